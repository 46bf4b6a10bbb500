package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// FlagError returns err, which is from parsing fs, in words of flags: it names the flag, the value and the values that
// are allowed. pflag's own errors contain the texts of Go's packages.
func FlagError(fs *pflag.FlagSet, err error) error {
	var (
		unknown *pflag.NotExistError
		bare    *pflag.ValueRequiredError
		invalid *pflag.InvalidValueError
	)
	switch {
	case errors.As(err, &unknown):
		name := unknown.GetSpecifiedName()
		return &UnknownFlagError{name, suggestion(fs, name, "--")}
	case errors.As(err, &bare):
		return fmt.Errorf("--%s has no value: want --%s=VALUE", bare.GetFlag().Name, bare.GetFlag().Name)
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s=%s: %w", invalid.GetFlag().Name, invalid.GetValue(), valueError(invalid.GetFlag(), err))
	}
	return err
}

// UnknownFlagError is an unknown flag of the command line.
type UnknownFlagError struct {
	// Name is the name of the flag without dashes.
	Name       string
	suggestion string
}

// Error implements error.
func (e *UnknownFlagError) Error() string { return "unknown flag: --" + e.Name + e.suggestion }

// valueError returns the reason that a value is not allowed, by the flag's type. err is the reason for types whose
// parsing is not Go's.
func valueError(f *pflag.Flag, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) && invalid.Unwrap() != nil {
		err = invalid.Unwrap()
	}
	if unsupported := (*UnsupportedFlag)(nil); errors.As(err, &unsupported) {
		return unsupported
	}
	kind := f.Value.Type()
	switch {
	case strings.HasSuffix(f.Name, "-port") && strings.HasPrefix(kind, "int"):
		return errors.New("not a port (1–65535)")
	case slices.Contains([]string{"int", "int32", "int64", "count"}, kind):
		return errors.New("not an integer")
	case strings.HasPrefix(kind, "uint"):
		return errors.New("not an integer of 0 or more")
	case strings.HasPrefix(kind, "float"):
		return errors.New("not a number")
	case kind == "bool":
		return errors.New("not true or false")
	case kind == "duration":
		return errors.New(`not a duration, such as "90s" or "5m"`)
	case kind == "ip":
		return errors.New("not an IP address")
	case kind == "stringToInt":
		return errors.New("not pairs of a name and an integer, such as a=1,b=2")
	}
	return err
}

// maxEdits bounds the edits between an unknown flag and the one that suggestion names.
const maxEdits = 3

// suggestion returns a text that suggests the flag of fs nearest to name, with prefix before the flag's name. It is
// empty if no flag is within maxEdits.
func suggestion(fs *pflag.FlagSet, name, prefix string) string {
	plain := func(s string) string { return strings.ToLower(strings.NewReplacer("-", "", "_", "").Replace(s)) }
	best, least := "", maxEdits+1
	fs.VisitAll(func(f *pflag.Flag) {
		if n := edits(plain(f.Name), plain(name)); !f.Hidden && n < least && n < len(plain(name)) {
			best, least = f.Name, n
		}
	})
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", prefix+best)
}

// edits returns the number of bytes to insert, remove, replace or swap with their neighbour to turn a into b.
func edits(a, b string) int {
	before, last, now := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		now[0] = i + 1
		for j := range len(b) {
			change := last[j]
			if a[i] != b[j] {
				change++
			}
			now[j+1] = min(change, last[j+1]+1, now[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				now[j+1] = min(now[j+1], before[j-1]+1)
			}
		}
		before, last, now = last, now, before
	}
	return last[len(b)]
}

// AtLeast returns an error that names the flag if its value is below least.
func AtLeast[T ~int | ~int64](flag string, value, least T) error {
	if value < least {
		return fmt.Errorf("--%s=%v: want %v or more", flag, value, least)
	}
	return nil
}
