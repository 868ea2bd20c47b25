"""The network: what peers say to each other, and what they may believe. Without torch and vLLM."""
