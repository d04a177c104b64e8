"""The scheduler: who is who, where keys live, who waits for whom, who has died.

Read ``state.py`` (the decisions, pure) first, then ``process.py`` (the socket and the clock);
clients use ``p3.control``.  The messages, each a JSON object with a "kind", and a blob:

    client -> scheduler
        register    role worker_id host pid addresses agreed version
        ready                                   a server admits the workers' tokens
        declare     req space key shape dtype mode whole
        ask         req name body, blob         a command for every server
        reply       req body error, blob        a server's answer to a command
        barrier     req
        order       space keys                  from rank 0
        status      req
        heartbeat
        fail        reason
        goodbye
    scheduler -> client
        refused     reason
        waiting     missing                     until the welcome
        welcome     rank num_workers num_servers, workers (to servers) or token servers
        command     req name body from_rank, blob
        reply       req error fault, and by request:
                    id first whole  |  bodies sizes_bytes, blob  |  status
        order       space keys
        key_error   space key reason
        heartbeat
        failed      role rank host reason       the job has failed
        stop                                    all workers are done
        bye                                     to goodbye and to fail
"""

from __future__ import annotations

from p3.config import Settings


def serve(settings: Settings) -> int:
    """Be the scheduler of a job until it ends; returns the process's exit code.  Blocks."""
    from p3 import __version__
    from p3.scheduler.process import serve as run

    return run(settings, __version__)
