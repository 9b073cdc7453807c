"""The probe of a field study: the same small training job again and again, watched by failslow.

Where other people's jobs may not be touched, a probe of one's own tells how the cluster does
(arXiv 2410.12588, section 3). In: a `ProbeSpec`. Out: a `ProbeResult`.
"""

from __future__ import annotations

from failslow.probe.result import ProbeResult, ProbeSpec, command

__all__ = ["ProbeResult", "ProbeSpec", "command"]
