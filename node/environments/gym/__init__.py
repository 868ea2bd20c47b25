"""The datasets of reasoning-gym as environments: what was found in each, and which are refused."""
