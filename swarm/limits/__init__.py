"""Limits on what a peer, an address block or an endpoint may ask of this node. Pure."""
