"""Being reached: where others see us, relays, hole punching."""
