"""p3: priority-based parameter propagation as a KVStore for MXNet.

``import p3`` loads neither MXNet nor ZeroMQ and starts nothing.  It sees to it that p3's
stores (``dist_sync_p3`` and the others of ``p3.naming``) are registered with MXNet: when
``mxnet`` is imported, or at once if it already is.  Without any MXNet it raises
``ImportError``, which says what to install.
"""

from p3 import _hook

__version__ = "0.1.0"
__all__ = ["__version__"]

_hook.install()
