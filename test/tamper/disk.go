// Package tamper controls the wall clock and the disk of a process. It needs no privileges, and no change of the
// program: it works for etcd and kube-apiserver too. It needs Linux 5.19.
package tamper

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Disk is the disk of a process.
type Disk struct {
	// delay is the additional time of each pwrite, fsync and fdatasync, in nanoseconds.
	delay atomic.Int64
}

// Slow sets how much longer each pwrite, fsync and fdatasync takes. Calls in progress keep their delay.
func (d *Disk) Slow(delay time.Duration) { d.delay.Store(int64(delay)) }

// StartWithDisk starts a command, as cmd.Start does, and returns its disk. The command must not have Pdeathsig, because
// the thread that starts it ends. StartWithDisk returns errors.ErrUnsupported, and starts nothing, if the kernel does
// not allow it.
func StartWithDisk(cmd *exec.Cmd) (*Disk, error) {
	d := &Disk{}
	started := make(chan error)
	go func() {
		// The command inherits the filter of the thread. The thread ends with the goroutine, which never unlocks it.
		runtime.LockOSThread()
		listener, err := installFilter()
		if err != nil {
			started <- fmt.Errorf("%w: the system calls of %s cannot be filtered: %w",
				errors.ErrUnsupported, cmd.Path, err)
			return
		}
		go d.serve(listener)
		started <- cmd.Start()
	}()
	return d, <-started
}

// installFilter lets each pwrite, fsync and fdatasync of the calling thread, and of processes that it starts, wait for
// a response on the returned file descriptor (seccomp_unotify(2)).
func installFilter() (listener int, err error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	calls := []uint32{unix.SYS_PWRITE64, unix.SYS_FSYNC, unix.SYS_FDATASYNC}
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // the number of the system call
	for i, call := range calls {
		filter = append(filter, unix.SockFilter{
			Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
			Jt:   uint8(len(calls) - i), // over the other calls and the first return
			K:    call,
		})
	}
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// Without WAIT_KILLABLE_RECV, the Go runtime's signals would restart the delayed call again and again.
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
		uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// notification is struct seccomp_notif, and response is struct seccomp_notif_resp.
type (
	notification struct {
		id         uint64
		pid, flags uint32
		data       [64]byte
	}
	response struct {
		id    uint64
		value int64
		error int32
		flags uint32
	}
)

// continueCall lets the kernel make the system call (SECCOMP_USER_NOTIF_FLAG_CONTINUE).
const continueCall = 1

// serve responds to the system calls of the filter until all processes with the filter have ended.
func (d *Disk) serve(listener int) {
	var delayed sync.WaitGroup
	ended := make(chan struct{})
	defer func() {
		close(ended)
		delayed.Wait() // they use the file descriptor
		_ = unix.Close(listener)
	}()
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 { // the last process has ended
				return
			}
			continue
		}
		n := notification{}
		if ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)) != 0 {
			continue // the process was killed meanwhile
		}
		respond := func() {
			r := response{id: n.id, flags: continueCall}
			_ = ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r)) // it fails if the process was killed
		}
		if delay := time.Duration(d.delay.Load()); delay > 0 {
			delayed.Go(func() {
				select {
				case <-time.After(delay):
					respond()
				case <-ended:
				}
			})
		} else {
			respond()
		}
	}
}

func ioctl(fd int, request uintptr, argument unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument))
	return errno
}
