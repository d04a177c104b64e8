"""Arrays that become ready when the test says so: the output of an operator that waits."""

from __future__ import annotations

import threading

import mxnet as mx

LIMIT_S = 25


class _Wait(mx.operator.CustomOp):
    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def forward(self, is_train, req, in_data, out_data, aux):
        assert self._gate.wait(LIMIT_S), "nobody opened the gate"
        self.assign(out_data[0], req[0], in_data[0])


_gates = {}  # by number, as an operator's arguments are text


@mx.operator.register("gate")
class _WaitProp(mx.operator.CustomOpProp):
    def __init__(self, number):
        super().__init__(need_top_grad=False)
        self._gate = _gates[number]

    def create_operator(self, ctx, in_shapes, in_dtypes):
        return _Wait(self._gate)


def behind_gate(array):
    """``(gate, copy of array)``: the copy is ready once ``gate.set()`` has been called."""
    gate = threading.Event()
    number = str(len(_gates))
    _gates[number] = gate
    return gate, mx.nd.Custom(array, op_type="gate", number=number)
