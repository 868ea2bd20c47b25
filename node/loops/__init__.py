"""What a node does in rounds or steps: SAPO, a learner, a rollout worker."""
