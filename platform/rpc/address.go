package rpc

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
)

// Address is where a replica serves: a port of a host, or a Unix socket.
type Address struct {
	Host string
	Port uint16
	// Path is the socket's; Host and Port are empty then.
	Path string
}

// ParseAddress reads host:port, or unix:/path. The path is absolute and clean, so that a socket has one name, and
// plain, since it is also one of a list, and what gRPC takes for a URL.
func ParseAddress(s string) (Address, error) {
	if path, ok := strings.CutPrefix(s, socketScheme); ok {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.Trim(path, plainPath) != "" {
			const want = "%q: want unix:/path, absolute, clean, and of ASCII letters, digits and /._-+@=~"
			return Address{}, fmt.Errorf(want, s)
		}
		return Address{Path: path}, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err == nil && host == "" {
		err = errors.New("no host")
	}
	n, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil || n == 0 {
		return Address{}, fmt.Errorf("%q: want host:port or unix:/path", s)
	}
	return Address{Host: host, Port: uint16(n)}, nil
}

// String is ParseAddress' inverse.
func (a Address) String() string {
	if a.Path != "" {
		return socketScheme + a.Path
	}
	return net.JoinHostPort(a.Host, strconv.Itoa(int(a.Port)))
}

const (
	socketScheme = "unix:"
	plainPath    = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+@=~"
)

// CheckAddresses says which of a flag's addresses is none.
func CheckAddresses(flag string, all []string) error {
	for _, a := range all {
		if _, err := ParseAddress(a); err != nil {
			return fmt.Errorf("--%s %w", flag, err)
		}
	}
	return nil
}
