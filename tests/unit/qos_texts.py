"""What tools say, for the checks' parsers.

tc's texts are from iproute2 6.1, smpquery's from infiniband-diags 44 asking a subnet that ibsim
simulated and opensm 3.3.23 configured with our file (but for VLHighLimit and OperVLs, which ibsim
does not keep). perfquery's, mlnx_qos's and ethtool's follow the format their sources print; no
such hardware was at hand.
"""

TC_QDISC = (
    '[{"kind":"htb","handle":"1:","root":true,"refcnt":3,"options":{"r2q":10,"default":"0x10",'
    '"direct_packets_stat":0,"direct_qlen":1000}}]\n'
)
TC_QDISC_NONE = '[{"kind":"noqueue","handle":"0:","root":true,"refcnt":2,"options":{}}]\n'

TC_CLASSES = """\
class htb 1:10 parent 1:1 prio 0 rate 198Mbit ceil 200Mbit burst 1584b cburst 1600b 
 Sent 123456 bytes 84 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0
 lended: 0 borrowed: 0 giants: 0
 tokens: 1000 ctokens: 1000

class htb 1:1 root rate 200Mbit ceil 200Mbit burst 1600b cburst 1600b 
 Sent 130456 bytes 90 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0
 lended: 0 borrowed: 0 giants: 0
 tokens: 1000 ctokens: 1000

class htb 1:20 parent 1:1 prio 1 rate 2Mbit ceil 200Mbit burst 1600b cburst 1600b 
 Sent 7000 bytes 6 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0
 lended: 0 borrowed: 0 giants: 0
 tokens: 100000 ctokens: 1000

"""  # noqa: W291

TC_FILTERS = """\
filter parent 1: protocol ip pref 1 u32 chain 0 
filter parent 1: protocol ip pref 1 u32 chain 0 fh 800: ht divisor 1 
filter parent 1: protocol ip pref 1 u32 chain 0 fh 800::800 order 2048 key ht 800 bkt 0 *flowid 1:20 not_in_hw 
  match 00060000/00ff0000 at 8
  match 50000000/ffe00000 at 20
filter parent 1: protocol ip pref 1 u32 chain 0 fh 800::801 order 2049 key ht 800 bkt 0 *flowid 1:20 not_in_hw 
  match 00060000/00ff0000 at 8
  match 00005000/0000ffe0 at 20
filter parent 1: protocol ipv6 pref 2 u32 chain 0 
filter parent 1: protocol ipv6 pref 2 u32 chain 0 fh 801: ht divisor 1 
filter parent 1: protocol ipv6 pref 2 u32 chain 0 fh 801::800 order 2048 key ht 801 bkt 0 *flowid 1:20 not_in_hw 
  match 00000600/0000ff00 at 4
  match 50000000/ffe00000 at 40
"""  # noqa: E501, W291

TC_DSCP_FILTERS = """\
filter parent 1: protocol ip pref 1 u32 chain 0 
filter parent 1: protocol ip pref 1 u32 chain 0 fh 800: ht divisor 1 
filter parent 1: protocol ip pref 1 u32 chain 0 fh 800::800 order 2048 key ht 800 bkt 0 *flowid 1:20 not_in_hw 
  match 00480000/00fc0000 at 0
"""  # noqa: E501, W291

PORT_INFO = """\
# Port info: Lid 2 port 1
Mkey:............................<not displayed>
GidPrefix:.......................0xfe80000000000000
Lid:.............................2
SMLid:...........................1
LinkWidthActive:.................4X
LinkState:.......................Active
NeighborMTU:.....................4096
SMSL:............................0
VLCap:...........................VL0-7
InitType:........................0x00
VLHighLimit:.....................240
VLArbHighCap:....................8
VLArbLowCap:.....................8
MtuCap:..........................4096
VLStallCount:....................7
HoqLife:.........................16
OperVLs:.........................VL0-3
"""

SL2VL = """\
# SL2VL table: Lid 2
#                 SL: | 0| 1| 2| 3| 4| 5| 6| 7| 8| 9|10|11|12|13|14|15|
ports: in  0, out  0: | 0| 1| 2| 3| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0|
"""

VLARB = """\
# VLArbitration tables: Lid 2 port 1 LowCap 8 HighCap 8
# Low priority VL Arbitration Table:
VL    : |0x0 |0x1 |0x2 |0x3 |0x0 |0x0 |0x0 |0x0 |
WEIGHT: |0xC0|0xC0|0x40|0xC0|0x0 |0x0 |0x0 |0x0 |
# High priority VL Arbitration Table:
VL    : |0x0 |0x1 |0x2 |0x3 |0x0 |0x0 |0x0 |0x0 |
WEIGHT: |0xC0|0xC0|0x0 |0xC0|0x0 |0x0 |0x0 |0x0 |
"""

VLARB_OPENSM_DEFAULT = """\
# VLArbitration tables: Lid 2 port 1 LowCap 8 HighCap 8
# Low priority VL Arbitration Table:
VL    : |0x0 |0x1 |0x0 |0x1 |0x0 |0x1 |0x0 |0x1 |
WEIGHT: |0x0 |0x4 |0x4 |0x4 |0x4 |0x4 |0x4 |0x4 |
# High priority VL Arbitration Table:
VL    : |0x0 |0x1 |0x0 |0x1 |0x0 |0x1 |0x0 |0x1 |
WEIGHT: |0x4 |0x0 |0x0 |0x0 |0x0 |0x0 |0x0 |0x0 |
"""

XMT_SL = """\
# PortXmitDataSL counters: Lid 2 port 1
PortSelect:......................1
CounterSelect:...................0x0000
XmtDataSL0:......................10
XmtDataSL1:......................0
XmtDataSL2:......................{kv}
XmtDataSL3:......................{model}
"""

MLNX_QOS = """\
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:1 dscp:15,14,13,12,11,10,09,08,
\tprio:2 dscp:23,22,21,20,19,18,17,16,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:4 dscp:39,38,37,36,35,34,33,32,
\tprio:5 dscp:47,46,45,44,43,42,41,40,
\tprio:6 dscp:55,54,53,52,51,50,49,48,
\tprio:7 dscp:63,62,61,60,59,58,57,56,
default priority:
Receive buffer size (bytes): 19872,220896,0,0,0,0,0,0,max_buffer_size=4151520
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     1   1   1   1   0   0   0   0   
\tbuffer      1   1   1   1   0   0   0   0   
tc: 0 ratelimit: unlimited, tsa: ets, bw: 33%
\t priority:  0
tc: 1 ratelimit: unlimited, tsa: ets, bw: 33%
\t priority:  1
tc: 2 ratelimit: unlimited, tsa: ets, bw: 1%
\t priority:  2
tc: 3 ratelimit: unlimited, tsa: ets, bw: 33%
\t priority:  3
tc: 4 ratelimit: unlimited, tsa: strict
\t priority:  4
tc: 5 ratelimit: unlimited, tsa: strict
\t priority:  5
tc: 6 ratelimit: unlimited, tsa: strict
\t priority:  6
tc: 7 ratelimit: unlimited, tsa: strict
\t priority:  7
"""  # noqa: W291

MLNX_QOS_FACTORY = """\
DCBX mode: OS controlled
Priority trust state: pcp
default priority:
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   0   0   0   0   0   
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1
tc: 1 ratelimit: unlimited, tsa: vendor
\t priority:  0
tc: 2 ratelimit: unlimited, tsa: vendor
\t priority:  2
tc: 3 ratelimit: unlimited, tsa: vendor
\t priority:  3
"""  # noqa: W291

ETHTOOL = """\
NIC statistics:
     rx_prio2_bytes: 5
     tx_prio2_bytes: {kv}
     tx_prio2_pause: 3
     tx_prio3_bytes: {model}
"""
