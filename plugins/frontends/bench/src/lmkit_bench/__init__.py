"""Measuring lmkit, and any server that speaks the OpenAI API: what `lmkit bench` runs.

result.py    a result file: machine, versions, commit, flags, raw samples
stats.py     percentiles, goodput, ratios with their spread
workload.py  prompts: random token ids with a shared prefix, or a file
engine.py    latency and throughput of an engine in this process
client.py    one streamed request over HTTP, with the time of each event
serve.py     many of them: closed loop by concurrency, open loop by Poisson rate
server.py    a server as a process: start it, wait for it, read its start-up phases and memory
limits.py    what the machine can do: read bandwidth, multiply-adds
kernels.py   every registered kernel against these limits
compare.py   two results, metric by metric
plot.py      results as pictures
"""
