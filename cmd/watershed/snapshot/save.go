package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/process"
	"watershed.dev/platform/recovery"
)

// Save saves a snapshot of an etcd.
type Save struct {
	inspect.Etcd
	File    string
	DataDir string
	Timeout time.Duration
}

// AddFlags adds every option to fs.
func (s *Save) AddFlags(fs *pflag.FlagSet) {
	s.Etcd.AddFlags(fs)
	fs.Lookup("etcd-servers").Usage = "The client URL of a member (scheme://ip:port). Empty: the etcd of --data-dir."
	fs.StringVar(&s.DataDir, "data-dir", ".watershed", "The directory of a running up or split.")
	fs.DurationVar(&s.Timeout, "timeout", 10*time.Minute, "How long the snapshot may take.")
}

// Run saves the snapshot, checks it, and prints its revision, keys and size. It replaces no file.
func (s *Save) Run(ctx context.Context, w io.Writer) error {
	if len(s.Servers) == 0 {
		if err := s.ofDataDir(); err != nil {
			return err
		}
	}
	if len(s.Servers) != 1 {
		return fmt.Errorf("--etcd-servers %s: want the URL of a single member", strings.Join(s.Servers, ","))
	}
	if _, err := os.Lstat(s.File); err == nil {
		return fmt.Errorf("%s exists: choose another file", s.File)
	}
	if err := connect(s.Servers[0]); err != nil {
		return fmt.Errorf("--etcd-servers %q: %w", s.Servers[0], err)
	}
	conf, err := s.Etcd.Config()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	if _, err := snapshot.NewV3(zap.NewNop()).Save(ctx, conf, s.File); err != nil {
		return fmt.Errorf("--etcd-servers %q: %w", s.Servers[0], err)
	}
	status, err := statusOf(s.File)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s: revision %d, %d keys, %.1f MB, hash %08x\n", s.File, status.Revision, status.TotalKey,
		float64(status.TotalSize)/1e6, status.Hash)
	return err
}

// statusOf describes a snapshot. etcd's code panics for a database that is not of etcd.
func statusOf(file string) (status snapshot.Status, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s cannot be read as a snapshot of etcd: %w", file, err)
		}
	}()
	defer recovery.ToError("etcd's code", &err)
	f, err := os.Open(file)
	if err != nil {
		return status, err
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil { // bbolt would wait for the lock
		return status, errors.New("a process uses it; save a snapshot of a running etcd with `watershed snapshot save`")
	}
	if err := checkHash(f); err != nil {
		return status, err
	}
	return snapshot.NewV3(zap.NewNop()).Status(file)
}

// checkHash returns an error unless a snapshot ends with the hash of its bytes. etcd's code maps the file into memory,
// and an incomplete file would end the process.
func checkHash(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	size := info.Size() - sha256.Size
	const page = 512 // etcd's pages are a multiple of it
	if size <= 0 || size%page != 0 {
		return errors.New("it is incomplete: it does not end with the hash that etcd appends")
	}
	sum, want := sha256.New(), make([]byte, sha256.Size)
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, size)); err != nil {
		return err
	}
	if _, err := f.ReadAt(want, size); err != nil {
		return err
	}
	if !bytes.Equal(sum.Sum(nil), want) {
		return errors.New("it is damaged: its bytes do not have the hash at its end")
	}
	return nil
}

// ofDataDir selects the etcd of a data directory: the socket of `up`, or the first member of `split` that listens.
func (s *Save) ofDataDir() error {
	sockets, err := process.SocketDir(s.DataDir)
	if err != nil {
		return err
	}
	if socket := filepath.Join(sockets, "etcd.sock"); inspect.Reachable(socket) { // config may be of an earlier split
		s.Servers = []string{"unix://" + socket}
		return nil
	}
	members, err := MembersOf(s.DataDir)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(members, func(m Member) bool { return m.Listen != "" && connect(m.Listen) == nil })
	if i < 0 {
		return fmt.Errorf("--data-dir %q: no etcd runs in this directory; set the directory of `up` or `split`, or "+
			"--etcd-servers", s.DataDir)
	}
	pki := func(name string) string { return filepath.Join(s.DataDir, "pki", name) }
	s.Servers = []string{members[i].Listen}
	s.CertFile, s.KeyFile = pki("inner-registry.crt"), pki("inner-registry.key")
	s.CAFile = pki("inner-ca.crt")
	return nil
}

// dialTimeout bounds a connection to a member of etcd.
const dialTimeout = 2 * time.Second

// connect returns an error if nothing listens at a client URL. etcd's client would try again until Timeout.
func connect(server string) error {
	network, address := "tcp", server
	if path, ok := strings.CutPrefix(server, "unix://"); ok {
		network, address = "unix", path
	} else if u, err := url.Parse(server); err == nil && u.Host != "" {
		address = u.Host
	}
	c, err := net.DialTimeout(network, address, dialTimeout)
	if err != nil {
		return err
	}
	return c.Close()
}
