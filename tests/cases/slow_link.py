"""A worker that moves 50 MB at low priority, and meanwhile 4 KB at high priority, again and again.

Prints, for each direction, how long both took.
"""

import json
import threading
import time

import mxnet as mx

kv = mx.kv.create("dist_sync_p3")
large, small = mx.nd.zeros((12_500_000,)), mx.nd.zeros((1024,))


def while_it_moves(end):
    """Exchange the small value until the large one has arrived, which ``end`` waits for."""
    arrived, began, waits = threading.Event(), time.monotonic(), []
    thread = threading.Thread(target=lambda: (end(), arrived.set()))
    thread.start()
    while not arrived.is_set():
        at = time.monotonic()
        kv.pushpull("small", small, out=small, priority=0)
        small.wait_to_read()
        waits.append(time.monotonic() - at)
    thread.join()
    seconds = time.monotonic() - began
    return {"bytes": 4 * large.size, "seconds": seconds, "urgent_seconds": waits}


kv.init(["large", "small"], [large, small])
mx.nd.waitall()
seen = {}

kv.push("large", large, priority=-10)
large[:] = 1  # waits, in the engine, until the push has read it
seen["to the server"] = while_it_moves(large.wait_to_read)

kv.pull("large", out=large, priority=-10)
seen["from the server"] = while_it_moves(large.wait_to_read)
print(json.dumps(seen))
