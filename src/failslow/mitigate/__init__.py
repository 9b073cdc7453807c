"""Plans carried out in the training processes themselves.

In: a `Plan` from the controller. Out: what became of it, an `Outcome`. Torch is imported only by
the modules that need it, never by this package itself.
"""
