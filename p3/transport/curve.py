"""The job's CURVE keys, derived from its secret, and the check of who presents them.

Every process that knows the secret derives the same two key pairs: one for listeners, one
for those who connect.  A stranger knows neither, so it can neither pass for a listener nor
connect to one: the listener's public key never travels, and the ZAP handler admits no
other client key.  Derivation is PBKDF2-HMAC-SHA256 (RFC 8018) with one salt a pair; its
rounds cost a guesser of weak secrets time and us about 20 ms once.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Optional

import zmq
import zmq.auth.thread
from zmq.utils import z85

_ROUNDS = 50_000
#: what loopback-only jobs without a secret use: encrypted all the same, but no protection
_NO_SECRET = b"p3: loopback only, no secret"


class CurveKeys(NamedTuple):
    """Key pairs as Z85 text; the same for every process of a job."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def derive(secret: Optional[bytes]) -> CurveKeys:
    """The keys of the job whose secret this is (``None``: a loopback-only job)."""
    server = _pair(secret or _NO_SECRET, b"p3-kvstore listener v1")
    client = _pair(secret or _NO_SECRET, b"p3-kvstore client v1")
    return CurveKeys(server[0], server[1], client[0], client[1])


def _pair(secret: bytes, salt: bytes) -> tuple[bytes, bytes]:
    seed = hashlib.pbkdf2_hmac("sha256", secret, salt, _ROUNDS, dklen=32)
    secret_key = z85.encode(seed)
    return zmq.curve_public(secret_key), secret_key


class _OnlyOurClients:
    """ZAP's question: may this client key connect?"""

    def __init__(self, client_public: bytes) -> None:
        self._allowed = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        """``key``: Z85 text of the connecting client's public key."""
        return key == self._allowed


def start_authenticator(
    context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys
) -> zmq.auth.thread.ThreadAuthenticator:
    """Answer ZAP requests of ``context``'s listeners on a thread, until ``stop()``."""
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _OnlyOurClients(keys.client_public))
    return authenticator
