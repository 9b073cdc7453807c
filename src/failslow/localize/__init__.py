"""From a job that is slow to the component at fault: suspicion, then a verdict.

In: `RankProfile`s of call streams, results of benchmarks. Out: `Diagnosis`, `Verdict`.
"""
