"""Several hosts on one machine: network namespaces with real NIC limits, a storage host, and the
same engines and front as anywhere else. docs/lab.md has the picture and the figures."""
