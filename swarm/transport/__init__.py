"""The transport interface and the parts that both transports share."""
