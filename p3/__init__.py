"""p3: a faster ``dist_sync`` for MXNet.  This is the map of the code, in the data's order.

    backward has made a gradient
      -> store.py       push, pull, pushpull
           refused.py       calls that p3 answers otherwise, or not
           arguments.py     what a call was given;  sparse.py: row-sparse arrays
      -> operations.py  a call becomes a request, and an operation of MXNet's engine
      -> engine.py      the engine starts it when the arrays are free, and waits for its end
           ndarray.py       an array's kind, identity and memory
      -> worker.py      the I/O thread: a key's requests one by one, its slices into the outbox
           slicing.py       which elements are a slice, and which server holds it
           forward_order.py     the layers' order, observed
           states.py        the optimizer's states, between servers and files
           compression.py, rows.py     fewer bits a value; only some rows
           optimizers.py    what the script changed on its optimizer, sent along
      -> exchange.py    outbox, credit and port joined
           priority.py      the ordering rule and the queue that keeps it
           credit.py        how many bytes may be in flight
           wire.py          what a message looks like
      -> transport/     three channels: data, credit, control; ZeroMQ or in one process
      -> server/        process.py: the loop;  shard.py: what to do with a slice
           rounds.py        whose pushes are summed, in which order
           server/updater.py    mx.optimizer applied to a slice;  sgd.py: SGD, faster
           server/touched.py    updates of some rows only
      -> exchange.py    the answer goes back the same way, by the same rule
      -> worker.py      into the weight's memory; the engine starts that layer's forward pass

    around it
      node.py           this process's part in a job;  control.py: its line to the scheduler
      scheduler/        ranks, keys and their places, barriers, who has died
      launch/           `p3 launch`, `p3 run`;  __main__.py: the p3 command
      naming.py         the stores' names, registered with MXNet by _hook.py, under compat.py
      mending/          what MXNet's Trainer and Module get wrong for p3's stores, put right
      config.py, errors.py, address.py     settings, what is raised, which address to use
      testing.py        local clusters for tests

Importing p3 loads neither mxnet nor zmq, and never serves.  It sees to it that MXNet, once
imported, knows p3's stores: ``mx.kv.create('dist_sync_p3')``.
"""

from p3 import _hook

__version__ = "0.1.0"
__all__ = ["__version__"]

_hook.install()
