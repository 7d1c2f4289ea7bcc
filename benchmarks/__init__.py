"""Times jaxgrad's ops and their peers: `python -m benchmarks --help` from the root of the repository.

Measuring:
  steps.py, scaling.py, conv.py, norm.py, gru.py, recurrent.py, per_example.py: the cases and contenders of one command
  each. flax_norm.py has the norms of flax.
  torch_*.py: the peers in PyTorch; of single calls, those of `python -m jaxgrad bench`, whose GRU on lax.scan is a
  contender too. networks/: those of steps.py and scaling.py. recurrent_models.py: those of recurrent.py. cudnn_rnn.py:
  the GRU by cuDNN's functions; cudnn_worker.py: its process.
  lax_variants.py: the best that users of jax.lax can do, with flags of XLA and other ways to write a convolution.
  timing.py times contenders in turn; compare.py makes one row of a report; roofline.py has the lower bounds of times.
  memory.py keeps page faults out of the times. environment.py describes hardware and versions. options.py holds the
  options of the command line.

Reading, without JAX:
  report.py: the JSON files in results/. contender_names.py: the names in them.
  tables.py, gru_table.py and headline.py write the tables of docs/benchmarks/ and README.md.
  charts.py, bar_chart.py and families.py draw docs/charts. wording.py puts reports into words.
"""
