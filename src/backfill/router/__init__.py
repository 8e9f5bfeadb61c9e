"""The router in front of several servers: replicas of one model."""
