"""Which pod of a StatefulSet serves a session, chosen by the client: rendezvous hashing.

Every client that knows the number of pods gives the same answer, and needs no service for it. A pod more or less moves
the sessions of that pod and no others. The answer is an address for `dsa_connect` or any gRPC channel."""
import hashlib


def pick_pod(session_id, n_pods, pattern="dsad-pool-{}.dsad-pool.dsad.svc:9460"):
    def weight(pod):
        return hashlib.sha256(f"{pod}/{session_id}".encode()).digest()
    return pattern.format(max(range(n_pods), key=weight))
