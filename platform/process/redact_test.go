package process

import (
	"testing"

	"github.com/spf13/pflag"
)

// A report has no credentials of a flag, in any form that a client of etcd or NATS accepts.
func TestFlagsLoseCredentials(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.String("nats-url", "", "")
	fs.StringSlice("etcd-servers", nil, "")
	fs.String("secret", "", "")
	_ = fs.SetAnnotation("secret", "classified", []string{"true"})
	for value, want := range map[string]string{
		"user:pw@host:4222":            "xxxxx@host:4222",
		"nats://TOKEN@host":            "nats://xxxxx@host",
		"tls://a:1, tls://u:pw@b:1":    "tls://a:1, tls://xxxxx@b:1",
		"/events#https://u:pw@h;https": "/events#https://xxxxx@h;https",
		"tls://a:1,tls://b:1":          "tls://a:1,tls://b:1",
	} {
		if err := fs.Set("nats-url", value); err != nil {
			t.Fatal(err)
		}
		if got := changedFlags(fs)["nats-url"]; got != want {
			t.Errorf("%q has become %q", value, got)
		}
	}
	if err := fs.Parse([]string{"--etcd-servers=https://u:pw@a,https://v:pw@b", "--secret=x"}); err != nil {
		t.Fatal(err)
	}
	all := changedFlags(fs)
	if all["etcd-servers"] != "[https://xxxxx@a,https://xxxxx@b]" || all["secret"] != "CLASSIFIED" {
		t.Errorf("%q", all)
	}
}
