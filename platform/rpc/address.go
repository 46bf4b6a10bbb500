package rpc

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
)

// Address is the address of a replica: host and port, or a Unix socket.
type Address struct {
	Host string
	Port uint16
	// Path is the socket's path. If it is set, Host and Port are empty.
	Path string
}

// ParseAddress parses host:port or unix:/path. A path must be absolute and clean, so that a socket has only one name.
// It must have plain characters, because flags hold comma-separated lists and gRPC parses addresses as URLs.
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

// String returns the text that ParseAddress parses.
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

// CheckAddresses returns an error for the first of a flag's addresses that is invalid.
func CheckAddresses(flag string, all []string) error {
	for _, a := range all {
		if _, err := ParseAddress(a); err != nil {
			return fmt.Errorf("--%s %w", flag, err)
		}
	}
	return nil
}
