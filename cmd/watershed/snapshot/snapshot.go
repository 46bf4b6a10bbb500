// Package snapshot saves and restores etcd with etcd's own code. A snapshot holds the record of the event log's epoch,
// so registry begins a new epoch after a restore (docs/operators/backup-restore.md). The package does not copy the
// event log, because registry writes it again from etcd. It starts no goroutine.
package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/recovery"
)

// Command is the parent of save and restore.
func Command(*pflag.FlagSet) func() error {
	return func() error { return errors.New("want save FILE or restore FILE") }
}

// SaveCommand saves a snapshot into the file that the argument names.
func SaveCommand(fs *pflag.FlagSet) func() error {
	s := &Save{}
	s.AddFlags(fs)
	return func() (err error) {
		if s.File, err = fileOf(fs, "save"); err != nil {
			return err
		}
		ctx, cancel := lifecycle.SignalContext()
		defer cancel()
		return s.Run(ctx, os.Stdout)
	}
}

// RestoreCommand restores the snapshot in the file that the argument names.
func RestoreCommand(fs *pflag.FlagSet) func() error {
	r := &Restore{}
	r.AddFlags(fs)
	return func() (err error) {
		if r.File, err = fileOf(fs, "restore"); err != nil {
			return err
		}
		return r.Run(os.Stdout)
	}
}

// fileOf returns the only argument of a command.
func fileOf(fs *pflag.FlagSet, name string) (string, error) {
	if fs.NArg() != 1 {
		return "", fmt.Errorf("%d arguments: want a file, as in watershed snapshot %s etcd.db", fs.NArg(), name)
	}
	return fs.Arg(0), nil
}

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
	return snapshot.NewV3(zap.NewNop()).Status(file)
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

// Member is a member of etcd in a data directory. Its fields are the settings of `watershed etcd`.
type Member struct {
	Dir     string `json:"data-dir"`
	Name    string `json:"name"`
	Listen  string `json:"listen-client-urls"`
	Peer    string `json:"listen-peer-urls"`
	Cluster string `json:"initial-cluster"`
}

// EtcdServersFile is the file of a data directory that has the servers of an etcd outside of the directory.
const EtcdServersFile = "etcd-servers"

// unusedPeer is the peer URL of a single member, which has no peers.
const unusedPeer = "http://localhost:1"

// MembersOf returns the members of etcd in a data directory of `split` or `up`.
func MembersOf(dir string) ([]Member, error) {
	single := []Member{{Dir: filepath.Join(dir, "etcd")}}
	files, _ := fs.Glob(os.DirFS(dir), "config/etcd-*.yaml")
	if len(files) == 0 {
		return single, nil
	}
	var all []Member
	for _, f := range files {
		f = filepath.Join(dir, f)
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		var m Member
		if err := yaml.Unmarshal(text, &m); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		m.Dir = filepath.Join(dir, filepath.Base(m.Dir)) // the directory may be a copy, or may have moved
		all = append(all, m)
	}
	hasData := func(m Member) bool { return exists(m.Dir) }
	if len(all) > 1 && !slices.ContainsFunc(all, hasData) && hasData(single[0]) { // `up` has run since
		return single, nil
	}
	return all, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Restore restores a snapshot.
type Restore struct {
	File    string
	DataDir string
	// Member is the member to restore instead of DataDir's members, if its Dir is set.
	Member Member
	// Bump is the distance of the restored revision to the snapshot's.
	Bump uint64
}

// AddFlags adds every option to fs. The flags of a member have etcdutl's names.
func (r *Restore) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&r.DataDir, "data-dir", ".watershed",
		"The directory of a stopped up or split. Its etcd and event log are moved aside.")
	fs.StringVar(&r.Member.Dir, "etcd-data-dir", "",
		"The new data directory of a member of another etcd, instead of --data-dir. It must be empty.")
	fs.StringVar(&r.Member.Name, "name", "", "The name of the member of --etcd-data-dir.")
	fs.StringVar(&r.Member.Peer, "initial-advertise-peer-urls", "", "The peer URL of the member of --etcd-data-dir.")
	fs.StringVar(&r.Member.Cluster, "initial-cluster", "", "Every member's name and peer URL, with --etcd-data-dir.")
	fs.Uint64Var(&r.Bump, "bump-revision", 0,
		"The amount by which the restored revision exceeds the snapshot's, so that revisions do not repeat for clients. "+
			"The revisions below are marked as compacted.")
}

// Run restores the snapshot, and prints the next steps.
func (r *Restore) Run(w io.Writer) error {
	status, err := statusOf(r.File)
	if err != nil {
		return err
	}
	restored := []Member{r.Member}
	if r.Member.Dir != "" {
		err = r.restore(r.Member, r.Member.Dir)
	} else {
		restored, err = r.restoreDataDir(w)
	}
	if err != nil {
		return err
	}
	for _, m := range restored {
		fmt.Fprintf(w, "Restored revision %d into %s\n", status.Revision, m.Dir)
	}
	_, err = fmt.Fprintln(w,
		"Start etcd and Watershed. Registry begins a new epoch of the event log, and clients list again.")
	return err
}

// restoreDataDir restores the members of DataDir beside their data, and then moves the data aside. An error leaves the
// data in its place.
func (r *Restore) restoreDataDir(w io.Writer) ([]Member, error) {
	dir, err := process.Resolve(r.DataDir)
	if err != nil {
		return nil, err
	}
	unlock, err := lock(dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	switch servers, err := os.ReadFile(filepath.Join(dir, EtcdServersFile)); {
	case err == nil:
		return nil, fmt.Errorf("--data-dir %q: its etcd is %s: restore the members of that etcd (--etcd-data-dir), or "+
			"remove %s to use the etcd of this directory", dir, strings.TrimSpace(string(servers)), EtcdServersFile)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	members, err := MembersOf(dir)
	if err != nil {
		return nil, err
	}
	stamp := time.Now().UTC().Format("20060102T150405Z")
	var aside, restored []move
	defer func() { // they are renamed unless an error has occurred
		for _, m := range restored {
			_ = os.RemoveAll(m.from)
		}
	}()
	for _, m := range members {
		restored = append(restored, move{m.Dir + ".restoring-" + stamp, m.Dir})
		if err := r.restore(m, restored[len(restored)-1].from); err != nil {
			return nil, err
		}
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if old := filepath.Join(dir, f.Name()); dataOfStores.MatchString(f.Name()) {
			aside = append(aside, move{old, old + ".before-" + stamp})
		}
	}
	signal.Ignore(os.Interrupt, unix.SIGTERM) // a signal would leave some directories with their old names
	defer signal.Reset(os.Interrupt, unix.SIGTERM)
	if err := moveAll(slices.Concat(aside, restored)); err != nil {
		return nil, err
	}
	for _, m := range aside {
		fmt.Fprintf(w, "Moved %s to %s\n", m.from, m.to)
	}
	return members, nil
}

// dataOfStores matches the names of the data directories of etcd and of the event log, which registry writes again.
var dataOfStores = regexp.MustCompile(`^(etcd|nats)(-[0-9]+)?$`)

// move is a change of a directory's name.
type move struct{ from, to string }

// moveAll renames directories in order. If that fails, it restores the names.
func moveAll(moves []move) error {
	for i, m := range moves {
		err := os.Rename(m.from, m.to)
		if err == nil {
			continue
		}
		for _, done := range slices.Backward(moves[:i]) {
			err = errors.Join(err, os.Rename(done.to, done.from))
		}
		return err
	}
	return nil
}

// restore restores a member into an empty or a new directory.
func (r *Restore) restore(m Member, dir string) error {
	name, peer := cmp.Or(m.Name, "watershed"), cmp.Or(m.Peer, unusedPeer)
	if err := snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
		SnapshotPath:        r.File,
		Name:                name,
		OutputDataDir:       dir,
		PeerURLs:            []string{peer},
		InitialCluster:      cmp.Or(m.Cluster, name+"="+peer),
		InitialClusterToken: "etcd-cluster",
		RevisionBump:        r.Bump,
		MarkCompacted:       r.Bump > 0,
	}); err != nil {
		return fmt.Errorf("%s is not restored into %s: want the file of a snapshot, and space for its objects: %w",
			r.File, dir, err)
	}
	return nil
}

// lock locks a data directory as `up` and `split` do. On a new machine, the directory may have pki only.
func lock(dir string) (unlock func(), err error) {
	if !exists(filepath.Join(dir, process.LockFile)) && !exists(filepath.Join(dir, "pki")) {
		return nil, fmt.Errorf("--data-dir %q has no lock and no pki: set the directory of `up` or `split`, or "+
			"--etcd-data-dir", dir)
	}
	if err := process.RestrictDirectory(dir); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	f, err := process.Lock(dir)
	if err != nil {
		return nil, err
	}
	return func() { f.Close() }, nil
}
