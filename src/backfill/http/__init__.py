"""What every HTTP server of Backfill has, an engine's and a router."""
