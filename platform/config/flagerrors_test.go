package config

import (
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func TestFlagErrorsNameTheFlagTheValueAndTheAllowed(t *testing.T) {
	for arg, want := range map[string]string{
		"--secure-port=abc":      "--secure-port=abc: not a port (1–65535)",
		"--request-timeout=5":    `--request-timeout=5: not a duration, such as "90s" or "5m"`,
		"--anonymous-auth=maybe": "--anonymous-auth=maybe: not true or false",
		"--audit-log-maxage=x":   "--audit-log-maxage=x: not an integer",
		"--goaway-chance=often":  "--goaway-chance=often: not a number",
		"--secure-prot=1":        `unknown flag: --secure-prot (did you mean "--secure-port"?)`,
		"--requesttimeout=1s":    `unknown flag: --requesttimeout (did you mean "--request-timeout"?)`,
		"--nope":                 "unknown flag: --nope",
		"--secure-port":          "--secure-port has no value: want --secure-port=VALUE",
	} {
		fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
		fs.Int("secure-port", 6443, "")
		fs.Duration("request-timeout", time.Minute, "")
		fs.Bool("anonymous-auth", true, "")
		fs.Int("audit-log-maxage", 0, "")
		fs.Float64("goaway-chance", 0, "")
		if err := Load(fs, []string{arg}); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", arg, err, want)
		}
	}
}

func TestEdits(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{{"", "abc", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"kitten", "sitting", 3}, {"port", "prot", 1}} {
		if got := edits(test.a, test.b); got != test.want {
			t.Errorf("edits(%q, %q) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}

func TestAtLeast(t *testing.T) {
	if err := AtLeast("log-retention", -time.Second, time.Second); err == nil ||
		err.Error() != "--log-retention=-1s: want 1s or more" {
		t.Error(err)
	}
	if err := AtLeast("watch-ring-bytes", 1, 1); err != nil {
		t.Error(err)
	}
}
