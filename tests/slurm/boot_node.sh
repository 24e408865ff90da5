#!/usr/bin/env bash
# Process 1 of a node: boot_node.sh NAME FOLDER, in namespaces of its own (cluster.py makes them).
set -euo pipefail
name="$1" folder="$2"
hostname "$name"
# Names from a file only: torch looks every peer up backwards, and an unreachable DNS server costs
# ten seconds each time.
for file in hosts nsswitch.conf resolv.conf; do
  mount --bind "$folder/etc/$file" "/etc/$file"
done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
export SLURM_CONF="$folder/etc/slurm.conf"
slurmd -D -N "$name" &
# As process 1 it also reaps what jobs leave behind.
wait $!
