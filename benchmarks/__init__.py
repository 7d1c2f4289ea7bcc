"""Times jaxgrad's ops against their peers; `python -m benchmarks --help` from the root of the repository.

An op's module (gru.py) names its cases, its contenders and its count of operations. The rest knows no op: timing.py
times contenders in turn, compare.py makes one row of the results, floor.py says what the arithmetic alone would take,
environment.py where it all ran, report.py prints and plots it, readme.py brings the results into README.md.
"""
