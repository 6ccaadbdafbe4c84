"""The environment as code: locks, caches, the locked environment, doctor, fingerprint. Knows nothing of models."""
