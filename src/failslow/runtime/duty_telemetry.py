"""Samples a node's telemetry once a second and answers orders for a window of it.

In: `Order(topic="telemetry", body={"since_t": …, "until_t": …})`, epoch seconds, each may be null:
as far back as is kept (10 minutes), until now. Out: one `Report` of the node as a whole (rank
None):

    {"since_t":1745735241.0,"until_t":1745735301.0,"interval_s":1.0,
     "t":[1745735241.2,1745735242.2,…],
     "series":{"cpu/neighbour_cores":[0.02,0.01,…,1.94],"net/eth0/tx_bytes_per_s":[9.1e7,null,…],
               "gpu/0/temperature_c":[…],"rdma/mlx5_0:1/cnp_handled_per_s":[…],
               "link/inter/rtt_s":[…],"link/inter/rtt_cv":[…]},
     "steady":{"cpu/steal_share":0.0,"net/eth0/tx_errors_per_s":0.0},
     "ranks":{"3":{"series":{"runqueue_share":[…]},"steady":{"throttled_share":0.0}}},
     "gpus":{"0":{"name":"NVIDIA H200","ranks":[3]}},
     "missing":["no NVML: the module pynvml is not installed"]}

`t` holds at most 120 times (epoch seconds by the node's clock; longer windows are averaged), and
every list as many values, null where there was none. A series that did not change in the window is
one number under `steady`. Names are `<source>/<what>` or `<source>/<which>/<what>`; units are their
endings: `_share` 0..1 of the time, `_s` seconds, `_c` °C, `_w` watts, `_mhz`, `_per_s`, `_cores`
CPU seconds a second, `_cv` standard deviation over mean; without one it is a plain number. What the
names mean stands in `failslow.telemetry`.
"""
