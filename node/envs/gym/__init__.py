"""The datasets of reasoning-gym."""
