#!/usr/bin/env bash
# Installs the system packages for a build that a fresh Debian or Ubuntu lacks: a C and a C++ compiler, make, and
# Python's headers and venv module. If all packages are installed, it changes nothing and needs no privileges.
#
# usage: scripts/system_packages.sh [PYTHON]
#        scripts/system_packages.sh --tests    packages for tests that simulate hosts or scrape monitors; they skip without
set -euo pipefail

if [ "${1:-}" = --tests ]; then
    # Without the right to install them there is none to make namespaces either. Nothing else needs them, so a mirror that
    # cannot be reached is no reason to fail.
    # iproute2 to ssh: simulated hosts; the MPIs and Slurm: the launcher's runners (70 MB on disk, 20 s); prometheus: monitors
    pairs="ip:iproute2 ps:procps pdsh:pdsh ssh:openssh-client sshd:openssh-server mpirun.openmpi:openmpi-bin
        mpirun.mpich:mpich munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client promtool:prometheus"
    PATH=$PATH:/usr/sbin:/sbin
    needed=
    for pair in $pairs; do
        command -v "${pair%%:*}" >/dev/null || needed="$needed ${pair##*:}"
    done
    if [ -n "$needed" ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
        policy=/usr/sbin/policy-rc.d
        if ! [ -e $policy ]; then # without it the packages would start sshd and munged
            trap 'rm -f $policy' EXIT
            printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
        fi
        # shellcheck disable=SC2086  # one word a package
        if ! { apt-get update -qq && install $needed; }; then
            for package in $needed; do # the mirror may lack some
                install "$package" || echo "$package could not be installed: its tests skip" >&2
            done
        fi
    fi
    exit 0
fi

python=${1:-python3}

missing() {
    local have
    command -v gcc >/dev/null || echo gcc
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    if ! command -v "$python" >/dev/null; then
        echo python3 python3-dev python3-venv
        return
    fi
    have=$("$python" -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))')
    [ "$have" = True ] || echo python3-dev
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

# Continuous integration compiles the same files again and again. Without ccache they only take longer.
if [ "${CI:-}" = true ] && ! command -v ccache >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ccache; } >/dev/null 2>&1 || true
fi

needed=$(missing | tr '\n' ' ')
[ -n "$needed" ] || exit 0

fail() {
    echo "missing on this system: $needed" >&2
    echo "$1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "Install a C and C++ compiler, make, and Python's headers and venv module, then run make again."
if [ "$(id -u)" = 0 ]; then
    as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
else
    fail "Ask an administrator for: apt-get install $needed"
fi
echo "installing from the system: $needed"
"${as_root[@]}" apt-get update -qq
# shellcheck disable=SC2086  # one word a package
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $needed >/dev/null
needed=$(missing | tr '\n' ' ')
[ -z "$needed" ] || fail "apt-get installed them, but $python does not find them: is it the system's Python? Try make PYTHON=/usr/bin/python3"
