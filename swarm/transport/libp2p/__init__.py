"""Real sockets: py-libp2p, with what of it has to be replaced. Nobody else imports libp2p."""
