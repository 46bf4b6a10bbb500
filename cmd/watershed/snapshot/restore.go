package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
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

	"watershed.dev/platform/process"
)

// unusedPeer is the peer URL of a single member, which has no peers.
const unusedPeer = "http://localhost:1"

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
		"The data directory of a stopped member of another etcd, instead of --data-dir. Existing data is moved aside.")
	fs.StringVar(&r.Member.Name, "name", "", "The name of the member of --etcd-data-dir.")
	fs.StringVar(&r.Member.Peer, "initial-advertise-peer-urls", "", "The peer URL of the member of --etcd-data-dir.")
	fs.StringVar(&r.Member.Cluster, "initial-cluster", "", "Every member's name and peer URL, with --etcd-data-dir.")
	fs.Uint64Var(&r.Bump, "bump-revision", 0,
		"The amount by which the restored revision exceeds the snapshot's, so that revisions do not repeat for clients. "+
			"The revisions below are marked as compacted.")
}

// readFrom copies a snapshot to a temporary file, which becomes File. remove removes the file.
func (r *Restore) readFrom(in io.Reader) (remove func(), err error) {
	f, err := os.CreateTemp("", "snapshot-*.db")
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(f, in)
	if err := errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return nil, fmt.Errorf("the snapshot is not read from standard input: %w", err)
	}
	r.File = f.Name()
	return func() { _ = os.Remove(r.File) }, nil
}

// Run restores the snapshot, and prints the next steps.
func (r *Restore) Run(w io.Writer) error {
	status, err := statusOf(r.File)
	if err != nil {
		return err
	}
	restore := r.restoreDataDir
	if r.Member.Dir != "" {
		restore = r.restoreMember
	}
	restored, err := restore(w)
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

// restoreDataDir restores the members of DataDir, and moves the data of etcd and of the event log aside.
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
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var old []string
	for _, f := range files {
		if dataOfStores.MatchString(f.Name()) {
			old = append(old, filepath.Join(dir, f.Name()))
		}
	}
	return members, r.replace(w, members, old)
}

// restoreMember restores Member into its directory. Data in the directory is moved aside.
func (r *Restore) restoreMember(w io.Writer) ([]Member, error) {
	members := []Member{r.Member}
	files, err := os.ReadDir(r.Member.Dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(files) == 0 {
		return members, r.restore(w, r.Member, r.Member.Dir)
	}
	if err != nil {
		return nil, fmt.Errorf("--etcd-data-dir %q: %w", r.Member.Dir, err)
	}
	switch db, err := os.Open(filepath.Join(r.Member.Dir, "member", "snap", "db")); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--etcd-data-dir %q has files, and no data of etcd: choose an empty directory", r.Member.Dir)
	case err != nil:
		return nil, fmt.Errorf("--etcd-data-dir %q: %w", r.Member.Dir, err)
	default:
		defer db.Close()
		if unix.Flock(int(db.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil { // etcd holds the lock while it runs
			return nil, fmt.Errorf("--etcd-data-dir %q: a process uses it; stop the member first", r.Member.Dir)
		}
	}
	return members, r.replace(w, members, []string{filepath.Clean(r.Member.Dir)})
}

// replace restores members beside their data, and then moves the old directories aside. An error leaves the data in its
// place.
func (r *Restore) replace(w io.Writer, members []Member, old []string) error {
	stamp := time.Now().UTC().Format("20060102T150405Z")
	var aside, restored []move
	defer func() { // they are renamed unless an error has occurred
		for _, m := range restored {
			_ = os.RemoveAll(m.from)
		}
	}()
	for _, m := range members {
		dir := filepath.Clean(m.Dir)
		restored = append(restored, move{dir + ".restoring-" + stamp, dir})
		if err := r.restore(w, m, restored[len(restored)-1].from); err != nil {
			return err
		}
	}
	for _, dir := range old {
		aside = append(aside, move{dir, dir + ".before-" + stamp})
	}
	signal.Ignore(os.Interrupt, unix.SIGTERM) // a signal would leave some directories with their old names
	defer signal.Reset(os.Interrupt, unix.SIGTERM)
	if err := moveAll(slices.Concat(aside, restored)); err != nil {
		return err
	}
	for _, m := range aside {
		fmt.Fprintf(w, "Moved %s to %s\n", m.from, m.to)
	}
	return nil
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

// restore restores a member into an empty or a new directory. It prints a line first, because a large snapshot takes
// long.
func (r *Restore) restore(w io.Writer, m Member, dir string) error {
	fmt.Fprintf(w, "Restoring %s into %s\n", r.File, dir)
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
