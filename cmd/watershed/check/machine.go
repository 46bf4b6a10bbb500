package check

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"watershed.dev/cmd/embedded"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
)

// Machine is the state of this machine before `up` or `split`.
type Machine struct {
	// Address is the address of the gateway, and AddressError is why a process cannot listen on it.
	Address      string
	AddressError error
	// Dir is the data directory, and DirError is why it cannot be used. Disk is its file system, and empty if no
	// directory of the path can be read. StoreBytes is the space that etcd and the event log may take.
	Dir        string
	DirError   error
	Disk       process.Disk
	DiskError  error
	StoreBytes uint64
	// OpenFiles is the hard limit of open files.
	OpenFiles uint64
	// ClockSynchronized reports if the kernel's clock is synchronized.
	ClockSynchronized bool
}

// readMachine reads the state of this machine for flags of `up`. It fails if fs lacks them, and changes nothing.
func (o *Options) readMachine(fs *pflag.FlagSet) (*Machine, error) {
	m := &Machine{Dir: o.DataDir, ClockSynchronized: clockSynchronized()}
	bind, err := fs.GetString("bind-address")
	port, portErr := fs.GetInt("secure-port")
	nats, natsErr := fs.GetString("nats-url")
	logBytes, logErr := fs.GetInt64("log-max-bytes")
	if err := errors.Join(err, portErr, natsErr, logErr); err != nil {
		return nil, err
	}
	if len(o.Etcd.Servers) == 0 {
		m.StoreBytes += embedded.EtcdQuotaBytes
	}
	if nats == "" {
		m.StoreBytes += uint64(logBytes)
	}
	m.Address = net.JoinHostPort(bind, strconv.Itoa(port))
	m.AddressError = process.CheckFree(m.Address)
	existing, err := nearest(o.DataDir)
	m.DirError = err
	if err == nil {
		m.DirError = dirProblem(o.DataDir, existing)
		m.Disk, _, m.DiskError = process.DiskOf("--data-dir", existing)
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		m.OpenFiles = limit.Max
	}
	return m, nil
}

// nearest returns the nearest directory of a path that exists.
func nearest(dir string) (string, error) {
	dir, err := process.Resolve(dir)
	for err == nil {
		if _, err = os.Stat(dir); !errors.Is(err, os.ErrNotExist) || dir == filepath.Dir(dir) {
			break
		}
		dir, err = filepath.Dir(dir), nil
	}
	return dir, err
}

// dirProblem returns why `up` and `split` cannot use a data directory. existing is its nearest directory that exists.
func dirProblem(dir, existing string) error {
	if err := unix.Access(existing, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%s is not writable: %w", existing, err)
	}
	if resolved, err := process.Resolve(dir); err != nil || resolved != existing {
		return err
	}
	if process.Locked(existing) {
		return errors.New("it is in use by a running `up` or `split`: `watershed check` without --pre checks it")
	}
	if process.HasForeignFiles(existing) {
		return errors.New("it has other files, and only this user may access a data directory")
	}
	_, err := process.CheckDirectory(existing)
	return err
}

// keyErrors describes the certificates whose key, in the file of another flag, cannot be read or has another pair.
func keyErrors(fs *pflag.FlagSet) (all []pki.Described) {
	value := func(flag string) string {
		if f := fs.Lookup(flag); f != nil {
			return f.Value.String()
		}
		return ""
	}
	for cert, key := range map[string]string{
		"tls-cert-file":              "tls-private-key-file",
		"proxy-client-cert-file":     "proxy-client-key-file",
		"kubelet-client-certificate": "kubelet-client-key",
	} {
		certFile, keyFile := value(cert), value(key)
		var err error
		switch {
		case certFile == "" && keyFile == "":
		case certFile == "" || keyFile == "":
			err = errors.New("the other flag is not set")
		default:
			_, err = tls.LoadX509KeyPair(certFile, keyFile)
		}
		if err != nil {
			all = append(all, pki.Described{Flag: "--" + cert + " with --" + key, File: cmp.Or(certFile, keyFile),
				Error: err.Error()})
		}
	}
	return all
}
