package check

import "golang.org/x/sys/unix"

// clockSynchronized reports if the kernel's clock is synchronized (adjtimex(2)).
func clockSynchronized() bool {
	var t unix.Timex
	_, err := unix.Adjtimex(&t)
	return err != nil || t.Status&unix.STA_UNSYNC == 0 // a container may not allow the call
}
