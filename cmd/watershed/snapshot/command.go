// Package snapshot saves and restores etcd with etcd's own code. A snapshot holds the record of the event log's epoch,
// so registry begins a new epoch after a restore (docs/operators/backup-restore.md). The package does not copy the
// event log, because registry writes it again from etcd. It starts no goroutine.
package snapshot

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"watershed.dev/platform/lifecycle"
)

// Command returns an error that names the commands save and restore, because it only groups them.
func Command(fs *pflag.FlagSet) func() error {
	const want = "want save FILE or restore FILE"
	return func() error {
		if fs.NArg() > 0 {
			return fmt.Errorf("unknown command %q: %s", fs.Arg(0), want)
		}
		return errors.New(want)
	}
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

// RestoreCommand restores the snapshot in the file that the argument names, or the snapshot from standard input ("-").
func RestoreCommand(fs *pflag.FlagSet) func() error {
	r := &Restore{}
	r.AddFlags(fs)
	return func() (err error) {
		if r.File, err = fileOf(fs, "restore"); err != nil {
			return err
		}
		if r.File != "-" {
			return r.Run(os.Stdout)
		}
		remove, err := r.readFrom(os.Stdin)
		if err != nil {
			return err
		}
		defer remove()
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
