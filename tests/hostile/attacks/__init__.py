"""Attacks that one peer can do below messages, under one key, and the offence that is counted."""

from swarm.errors import Reject

ON_SOCKETS = {
    "idle_tcp": None,
    "garbage_noise": None,
    "silent_streams": None,
    "slow_streams": None,
    "slow_payloads": None,
    "half_requests": None,
    "unread_answers": Reject.FLOOD,
    "announced_requests": None,
    "garbage_on_streams": Reject.MALFORMED,
    "garbage_on_gossip": Reject.MALFORMED,
}
