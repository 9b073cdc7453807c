"""Samples what the machine says of itself: processors, GPUs, RDMA ports, the network.

In: /proc, /sys, NVML, the sockets of the workers. Out: numbers by name, units in the names.

Of the node:
    cpu/busy_share             all cores, everybody
    cpu/steal_share            taken by the hypervisor
    cpu/pressure_share         somebody waited for a core (PSI, the whole machine)
    cpu/neighbour_cores        used by processes that are not the job's
    cpu/job_cores              used by the job's processes on this machine
    net/eth0/{tx,rx}_{bytes,packets,drops,errors}_per_s, net/eth0/speed_bits_per_s
    tcp/{retransmits,timeouts,ecn_marked,out_of_order}_per_s
    link/{intra,inter}/rtt_s   mean round trip of the workers' TCP connections inside this host
                               and to others, queueing here included
    link/{intra,inter}/rtt_cv  how much it varies between them
    peer/10.77.0.2/{rtt_s,queued_bytes,retransmits_per_s,sent_bytes_per_s,received_bytes_per_s,
        busy_share,delivery_bytes_per_s}   of the workers' connections to one other host: the
                               longest round trip, not yet acknowledged, how long something was
                               under way, how fast what was sent last arrived
    rdma/mlx5_0:1/{cnp_sent,cnp_handled,ecn_marked,out_of_sequence,retransmits,timeouts,no_buffer,
        discards,errors,wait_ticks,tx_bytes,rx_bytes}_per_s, …/{speed_bits_per_s,width,active}
    gpu/0/{sm_share,memory_share,sm_mhz,sm_max_mhz,memory_mhz,memory_max_mhz,temperature_c,power_w,
        power_limit_w}, gpu/0/throttle_{power,thermal,hardware,other} (1 or 0),
        gpu/0/{ecc_corrected,ecc_uncorrected,pcie_replays,nvlink_errors}_per_s,
        gpu/0/{pcie,nvlink}_{tx,rx}_bytes_per_s
Of a worker, each under its rank:
    cpu_cores                  its processor time
    runqueue_cores             its thread that waited longest was ready and had no core
    runqueue_share             of the time they were ready, how much they waited
    throttled_share            of the periods of its control groups' quotas, those that held it...
    throttled_cores            ...and CPU time that kept from it, summed over cores
    stopped_share              it was stopped by a signal
    pressure_share             somebody in its control group waited for a core (PSI)
    switches_per_s, forced_switches_per_s   of its main thread
    rtt_s, queued_bytes, … as of a peer: its connections to other hosts
"""
