"""How much a peer, an address block or an endpoint may ask of us. Pure."""
