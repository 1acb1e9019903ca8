#!/usr/bin/env bash
# Runs a command in a throw-away virtual machine whose kernel has RDMA devices in software (rdma_rxe):
# rxe_a (10.77.0.1, on veth_a) and rxe_b (10.77.0.2, on veth_b), joined by a cable. It is emulated
# (TCG), so that it needs no privileges and runs within other virtual machines; KVM only where
# SHARDPACK_RDMA_VM_ACCEL=kvm says so. The kernel is Debian's, unpacked into target/rdma-vm and never
# installed.
#
#   tests/rdma_vm.sh [-t SECONDS] [-m MIB] PROGRAM... -- 'command in the machine'
#
# Programs (and folders) lie in /bin there, and ip, tc and rdma beside them: `ip link set veth_a down` pulls the
# cable, `tc qdisc add dev veth_a root netem loss 1%` loses packets. Exit status: the command's; 97:
# it ran longer than SECONDS (150); 98: the machine ended without a status. Sourced, this file
# gives `machine_ready` and `machine`, which take the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/skip.sh
source tests/skip.sh
# shellcheck source=tests/environment.sh
source tests/environment.sh
machine=${SHARDPACK_RDMA_VM:-target/rdma-vm}
libraries=/usr/lib/x86_64-linux-gnu

# Installs what is missing where that is allowed, and unpacks the kernel; else says why it skips.
machine_ready() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || skip rdma-vm "the machine is made on Linux, x86-64"
    local have=1 tool
    for tool in qemu-system-x86_64 busybox ip tc rdma modprobe depmod cpio python3 dpkg-deb; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || have=
    done
    if [ -z "$have" ] || ! compgen -G "$libraries/libibverbs/librxe-rdmav*.so" >/dev/null; then
        local packages=(qemu-system-x86 busybox-static ibverbs-providers rdma-core iproute2 kmod cpio python3)
        debian "${packages[@]}" || skip rdma-vm "needs Debian's packages: ${packages[*]}"
    fi
    export PATH=$PATH:/usr/sbin:/sbin
    [ -s "$machine/vmlinux" ] && [ -d "$machine/unpacked/lib/modules" ] || machine_kernel || skip rdma-vm "Debian's kernel cannot be downloaded"
}

# The generic kernel (the one for clouds has no rdma_rxe) and the modules that are needed.
machine_kernel() {
    local package part
    mkdir -p "$machine"
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ {print $2; exit}')
    [ -n "$package" ] || return 1
    # A download that was cut off leaves nothing that counts.
    rm -rf "$machine/unpacked" "$machine"/*.deb
    (cd "$machine" && timeout 600 apt-get download -qq "$package") || return 1
    local parts=(./boot/vmlinuz-\* './lib/modules/*/modules.*')
    for part in drivers/infiniband/core drivers/infiniband/sw net/ipv4 net/ipv6 net/core; do
        parts+=("./lib/modules/*/kernel/$part/*")
    done
    parts+=('./lib/modules/*/kernel/drivers/net/veth.ko' './lib/modules/*/kernel/net/sched/sch_netem.ko'
        './lib/modules/*/kernel/crypto/crc32*' './lib/modules/*/kernel/arch/x86/crypto/crc32*')
    mkdir "$machine/unpacked"
    dpkg-deb --fsys-tarfile "$machine/$package"_*.deb | tar -x -C "$machine/unpacked" --wildcards "${parts[@]}"
    rm -f "$machine"/*.deb
    depmod -b "$machine/unpacked" "$(basename "$machine"/unpacked/lib/modules/*)"
    # The kernel itself boots 6 s sooner than the compressed image, which the guest would unpack.
    python3 - "$machine"/unpacked/boot/vmlinuz-* "$machine/vmlinux.part" <<'PYTHON'
import lzma, struct, sys

image = open(sys.argv[1], "rb").read()
# Documentation/arch/x86/boot.rst: setup_sects at 0x1f1, payload_offset and payload_length at 0x248.
offset, length = struct.unpack_from("<II", image, 0x248)
start = ((image[0x1F1] or 4) + 1) * 512 + offset
payload = image[start : start + length]
assert payload[:6] == b"\xfd7zXZ\0", f"expected a kernel packed with xz, found {payload[:6]}"
kernel = lzma.LZMADecompressor().decompress(payload)
assert kernel[:4] == b"\x7fELF", f"expected an ELF file, found {kernel[:4]}"
open(sys.argv[2], "wb").write(kernel)
PYTHON
    mv "$machine/vmlinux.part" "$machine/vmlinux"
}

# machine_copy ROOT FILE...: the libraries of each file, where the loader finds them.
machine_copy() {
    local root=$1 file library
    shift
    for file in "$@"; do
        { ldd "$file" 2>/dev/null || true; } | awk '{for (i = 1; i <= NF; i++) if ($i ~ /^\//) print $i}' |
            while read -r library; do
                [ ! -e "$root$library" ] || continue
                mkdir -p "$root$(dirname "$library")"
                cp -L "$library" "$root$library"
            done
    done
}

# machine_root ROOT COMMAND PROGRAM...: the files of the machine.
machine_root() {
    local root=$1 command=$2 applet tool version number=0 module
    shift 2
    mkdir -p "$root"/{bin,proc,sys,dev,tmp,modules,lib64,etc/libibverbs.d,"$libraries/libibverbs"}
    cp -L "$(command -v busybox)" "$root/bin/busybox"
    # Debian's ash runs its own ip and tc instead of the real ones; dash does not.
    for applet in $(busybox --list); do
        case $applet in ip | tc | sh | busybox) ;; *) ln -s busybox "$root/bin/$applet" ;; esac
    done
    cp -L /bin/dash "$root/bin/sh"
    for tool in ip tc rdma; do cp -L "$(command -v "$tool")" "$root/bin/$tool"; done
    cp -L "$libraries/libibverbs.so.1" "$root$libraries/"
    cp -L "$libraries"/libibverbs/librxe-rdmav*.so "$root$libraries/libibverbs/"
    echo "driver rxe" >"$root/etc/libibverbs.d/rxe.driver"
    [ $# = 0 ] || cp -rL --remove-destination "$@" "$root/bin/"
    machine_copy "$root" /bin/dash "$root"/bin/{ip,tc,rdma} "$root$libraries/libibverbs.so.1" "$@"
    machine_copy "$root" "$root$libraries"/libibverbs/*.so
    version=$(basename "$machine"/unpacked/lib/modules/*)
    # rdma_rxe asks for crc32 by name, which no dependency says.
    for module in crc32_generic crc32-pclmul rdma_rxe veth sch_netem; do
        modprobe -d "$machine/unpacked" -S "$version" --show-depends "$module"
    done | awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r module; do
        cp "$module" "$root/modules/$(printf %02d $number)-$(basename "$module")"
        number=$((number + 1))
    done
    printf '%s\n' "$command" >"$root/command"
    cat >"$root/init" <<'INIT'
#!/bin/sh
export PATH=/bin HOME=/tmp SHARDPACK_IN_RDMA_VM=1 LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
for module in /modules/*.ko; do insmod "$module"; done
ulimit -l unlimited
ip link set lo up
ip link add veth_a type veth peer name veth_b
for name in all default veth_a veth_b; do
    echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
done
# MTU 4200: RDMA messages travel in packets of 4096 bytes, as over Thunderbolt.
for name in a:1 b:2; do
    ip link set veth_${name%:*} mtu 4200
    ip addr add 10.77.0.${name#*:}/24 dev veth_${name%:*}
    ip link set veth_${name%:*} up
done
# Both ends are in one network namespace (rdma_rxe carries nothing in another one), where packets
# between them would take the short way through lo, which has no device.
wire() {
    ip route add 10.77.0.$3/32 dev veth_$1 src 10.77.0.$2 table 10$3
    ip rule add pref 10 iif lo to 10.77.0.$3 lookup 10$3
    ip neigh add 10.77.0.$3 lladdr "$(cat /sys/class/net/veth_$4/address)" dev veth_$1 nud permanent
}
wire a 1 2 b
wire b 2 1 a
ip rule add pref 100 lookup local
ip rule del pref 0
rdma link add rxe_a type rxe netdev veth_a
rdma link add rxe_b type rxe netdev veth_b
turns=0
while [ "$(rdma link | grep -c ACTIVE)" -lt 2 ] && [ $turns -lt 100 ]; do
    sleep 0.1
    turns=$((turns + 1))
done
echo "machine: ready after $(cut -d' ' -f1 /proc/uptime) s"
sh /command </dev/null
echo "RDMA_VM_EXIT=$?"
poweroff -f
INIT
    chmod +x "$root/init"
}

machine() {
    local seconds=150 memory=512 programs=() command status work
    while [ $# -gt 0 ]; do
        case $1 in
            -t) seconds=$2 && shift 2 ;;
            -m) memory=$2 && shift 2 ;;
            --) shift && break ;;
            *) programs+=("$1") && shift ;;
        esac
    done
    command=$*
    work=$(mktemp -d)
    machine_root "$work/root" "$command" "${programs[@]}"
    (cd "$work/root" && find . | cpio -o -H newc --quiet -R 0:0) >"$work/initrd"
    status=0
    timeout --kill-after=5 "$seconds" qemu-system-x86_64 -M pc \
        -accel "${SHARDPACK_RDMA_VM_ACCEL:-tcg,thread=multi}" -cpu max -m "$memory" -smp 2 \
        -nodefaults -no-user-config -display none -no-reboot -serial stdio \
        -kernel "$machine/vmlinux" -initrd "$work/initrd" \
        -append "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr tsc=reliable random.trust_cpu=on" \
        </dev/null 2>&1 | sed -u 's/\r//' | tee "$work/log" | { grep -a --line-buffered -v '^RDMA_VM_EXIT=' || true; } ||
        status=${PIPESTATUS[0]}
    local said
    said=$(grep -a -o '^RDMA_VM_EXIT=[0-9]*' "$work/log" | tail -1 | cut -d= -f2 || true)
    rm -rf "$work"
    [ -z "$said" ] || return "$said"
    [ "$status" != 124 ] || return 97
    return 98
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    machine_ready
    machine "$@"
fi
