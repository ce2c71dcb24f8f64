#!/usr/bin/env bash
# Install Debian packages for the tests that need them: install_debian.sh slurm | ceph | chromium
# No service is started. Without root or apt-get, print a notice; the tests are then skipped.
set -euo pipefail
case ${1:-} in
    slurm) # 14 MB: a cluster of two nodes
        packages="slurm-wlm slurmctld slurmd slurm-client munge"
        programs="slurmctld slurmd sbatch munged" ;;
    ceph) # 286 MB: an S3 server
        packages="ceph-mon ceph-osd ceph-mgr radosgw ceph-common"
        programs="ceph-mon ceph-osd ceph-mgr radosgw radosgw-admin monmaptool ceph" ;;
    chromium) # 77 MB: a browser for the studio's page
        packages="chromium fonts-dejavu-core"
        programs="chromium" ;;
    *)
        echo "usage: $0 slurm | ceph | chromium" >&2
        exit 2 ;;
esac
installed=yes
for program in $programs; do
    command -v "$program" > /dev/null || installed=no
done
if [ "$installed" = yes ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "############################################################################" >&2
    echo "# ${1^^} WILL NOT BE TESTED: installing it needs root and apt-get." >&2
    echo "############################################################################" >&2
    exit 0
fi
echo "installing $packages …"
# In run level 1 the packages do not start their services.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
install() { apt-get install -y -qq --no-install-recommends $packages > /dev/null; }
install || { apt-get update -qq && install; }
