"""What the network above needs of a transport, and what both transports share."""
