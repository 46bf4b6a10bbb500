package check

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/services/admission"
	"watershed.dev/services/registry"
	"watershed.dev/services/registry/etcdstatus"
	"watershed.dev/services/watchfanout"
)

var now = time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)

// healthy returns an input without faults: a process of each service, and two of watchfanout.
func healthy(t *testing.T) *Input {
	t.Helper()
	in := &Input{Now: now, Cluster: Cluster{
		Webhooks: []Webhook{{Name: "ValidatingWebhookConfiguration v, webhook w", Required: true,
			Endpoint: "a.b.svc:443/"}},
		APIServices: []APIService{{Name: "v1.apps"}},
	}}
	states := map[string]any{
		"registry": &registry.State{
			Etcds: []etcdstatus.Status{{Servers: []string{"https://e:2379"}, Revision: 100, Voting: 1,
				Members: []etcdstatus.Member{{Endpoint: "https://e:2379", Version: "3.6.16", Leader: true,
					HasLeader: true, Bytes: 1e6, QuotaBytes: 2e9}}}},
			Logs: []registry.LogState{{Publishing: true, Revision: 100, Replicas: 1, Current: 1, Wanted: 1}},
		},
		"watchfanout": &watchfanout.Status{Ready: true, Revision: 100},
		"admission":   &admission.State{},
	}
	for i, s := range append(slices.Clone(services), "watchfanout") {
		r := &process.Report{ID: s, Host: "h", PID: i, Services: []string{s}, Version: "v1", Time: now,
			Flags: map[string]string{"rpc-address": string(rune('a' + i)), "v": "0"},
			Certificates: []pki.Described{{Flag: "--rpc-cert-file", File: "/pki/" + s, NotBefore: now.AddDate(-1, 0, 0),
				NotAfter: now.AddDate(1, 0, 0)}},
			Disks: []process.Disk{{Flag: "--data-dir", Path: "/d", FreeBytes: 50e9, TotalBytes: 100e9}},
		}
		if st, ok := states[s]; ok {
			set(t, r, st)
		}
		in.Reports = append(in.Reports, r)
	}
	in.Later = slices.Clone(in.Reports)
	in.Deep = slices.Clone(in.Reports)
	for i, r := range in.Deep {
		if r.Services[0] == "watchfanout" {
			compared := *r
			set(t, &compared, &watchfanout.Status{Compared: []*logreader.Comparison{{Resources: 2, Objects: 30}}})
			in.Deep[i] = &compared
		}
	}
	return in
}

// set sets the state of a report's service.
func set(t *testing.T, r *process.Report, st any) {
	t.Helper()
	data, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	r.States = map[string]json.RawMessage{r.Services[0]: data}
}

// Without a fault every check is ok.
func TestNoFaults(t *testing.T) {
	all := Find(healthy(t))
	if len(all) != len(checks) || Worst(all) != OK {
		t.Errorf("%+v", all)
	}
}

// signed returns a certificate that signer has signed, and its key. Without a signer the certificate signs itself.
func signed(t *testing.T, name string, signer *x509.Certificate, by *ecdsa.PrivateKey) (*x509.Certificate,
	*ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: now.AddDate(-1, 0, 0), NotAfter: now.AddDate(1, 0, 0), IsCA: name != "leaf",
		BasicConstraintsValid: true}
	if signer == nil {
		signer, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, signer, key.Public(), by)
	if err == nil {
		c, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c, key
}

// The serving certificate may be signed by an intermediate certificate, which the gateway presents too.
func TestIntermediatesOfTheServingCertificate(t *testing.T) {
	root, rootKey := signed(t, "root", nil, nil)
	intermediate, key := signed(t, "intermediate", root, rootKey)
	leaf, _ := signed(t, "leaf", intermediate, key)
	in := healthy(t)
	in.Roots = x509.NewCertPool()
	in.Roots.AddCert(root)
	for want, serving := range map[Level][]*x509.Certificate{OK: {leaf, intermediate}, Error: {leaf}} {
		in.Serving = serving
		if all := Find(in); Worst(all) != want {
			t.Errorf("with %d certificates: %+v", len(serving), all)
		}
	}
}

// Each fault has a finding of its check, with a level, a remedy and a link. No other check has a finding.
func TestEveryFaultIsFound(t *testing.T) {
	const gateway, registries, replica, other = 0, 4, 5, 6
	compared := func(in *Input, c logreader.Comparison) {
		set(t, in.Deep[replica], &watchfanout.Status{Compared: []*logreader.Comparison{{}, &c}})
	}
	state := func(in *Input, change func(*registry.State)) {
		st := &registry.State{}
		in.Reports[registries].State("registry", st)
		change(st)
		set(t, in.Reports[registries], st)
	}
	member := func(in *Input, change func(*etcdstatus.Status, *etcdstatus.Member)) {
		state(in, func(st *registry.State) { change(&st.Etcds[0], &st.Etcds[0].Members[0]) })
	}
	for name, c := range map[string]struct {
		check string
		level Level
		text  string
		plant func(*Input)
	}{
		"stopped process": {"processes", Error, "authn", func(in *Input) {
			in.Reports[1] = &process.Report{Services: []string{"authn"}, Address: "h:1", Error: "connection refused"}
		}},
		"process that is not ready": {"processes", Error, "is not ready: authz: stale", func(in *Input) {
			in.Reports[2].NotReady = map[string]string{"authz": "stale"}
		}},
		"missing service": {"processes", Error, "no process runs authn", func(in *Input) {
			in.Reports = slices.Delete(in.Reports, 1, 2)
		}},
		"mixed versions": {"versions", Warning,
			`"v1" (admission h/3; authn h/1; authz h/2; 3 more), "v2" (gateway h/0)`,
			func(in *Input) { in.Reports[gateway].Version = "v2" }},
		"flag drift": {"flags", Warning, `--v differs between processes of watchfanout: "0" (h/5), "4" (h/6)`,
			func(in *Input) { in.Reports[other].Flags = map[string]string{"v": "4"} }},
		"etcd that loses events": {"etcd", Error, "has the version 3.5.12, which may send progress before events",
			func(in *Input) {
				member(in, func(_ *etcdstatus.Status, m *etcdstatus.Member) { m.Version = "3.5.12" })
			}},
		"expired certificate": {"certificates", Error, "ended on 2026-04-30", func(in *Input) {
			in.Reports[1].Certificates[0].NotAfter = now.Add(-time.Hour)
		}},
		"certificate that ends soon": {"certificates", Warning, "ends on 2026-05-02", func(in *Input) {
			in.Reports[1].Certificates[0].NotAfter = now.Add(36 * time.Hour)
		}},
		"certificate of the future": {"certificates", Error, "is not valid before", func(in *Input) {
			in.Reports[1].Certificates[0].NotBefore = now.Add(time.Hour)
		}},
		"unreadable certificate": {"certificates", Error, "cannot be read: gone", func(in *Input) {
			in.Reports[1].Certificates[0] = pki.Described{Flag: "--x", File: "/x", Error: "gone"}
		}},
		"wrong CA in a file": {"ca", Error, "has not signed it", func(in *Input) {
			in.Reports[1].Certificates[0].Error = "the CA in /ca has not signed it"
		}},
		"wrong CA between processes": {"ca", Error, "do not accept each other's certificates", func(in *Input) {
			in.Reports[other] = &process.Report{Services: []string{"watchfanout"}, Address: "h:1",
				Error: "x509: certificate signed by unknown authority"}
			in.Later[other] = in.Reports[other]
		}},
		"skewed clock": {"clocks", Error, "the clock of authz h/2 differs by -90.0 s", func(in *Input) {
			in.Reports[2].SkewSeconds = -90
		}},
		"full disk": {"disks", Error, "has 95 MiB free", func(in *Input) { in.Reports[0].Disks[0].FreeBytes = 100e6 }},
		"disk that fills up": {"disks", Warning, "has 953 MiB free", func(in *Input) {
			in.Reports[0].Disks[0].FreeBytes = 1e9
		}},
		"etcd without a quorum": {"etcd", Error, "has no quorum and no leader (3 voting members)", func(in *Input) {
			member(in, func(s *etcdstatus.Status, m *etcdstatus.Member) {
				s.Error, s.Voting, m.HasLeader, m.Leader = "deadline exceeded", 3, false, false
			})
		}},
		"stopped etcd": {"etcd", Error, "no member of etcd https://e:2379 responds to registry h/4", func(in *Input) {
			member(in, func(s *etcdstatus.Status, m *etcdstatus.Member) {
				s.Error, *m = "deadline exceeded", etcdstatus.Member{Endpoint: m.Endpoint, Error: "refused"}
			})
		}},
		"a stopped member": {"etcd", Warning, "etcd https://f:2379 does not respond", func(in *Input) {
			member(in, func(s *etcdstatus.Status, _ *etcdstatus.Member) {
				s.Members = append(s.Members, etcdstatus.Member{Endpoint: "https://f:2379", Error: "refused"})
			})
		}},
		"etcd alarm": {"etcd", Error, "has the alarm NOSPACE", func(in *Input) {
			member(in, func(s *etcdstatus.Status, _ *etcdstatus.Member) { s.Alarms = []string{"NOSPACE"} })
		}},
		"large etcd": {"etcd", Warning, "has 1900 MB of 2000 MB", func(in *Input) {
			member(in, func(_ *etcdstatus.Status, m *etcdstatus.Member) { m.Bytes = 19e8 })
		}},
		"slow etcd": {"etcd", Warning, "took 0.50 s", func(in *Input) {
			member(in, func(s *etcdstatus.Status, _ *etcdstatus.Member) { s.ReadSeconds = 0.5 })
		}},
		"etcd of the flags": {"etcd", Error, "has the alarm CORRUPT", func(in *Input) {
			in.Etcd = &etcdstatus.Status{Servers: []string{"https://g:2379"}, Alarms: []string{"CORRUPT"}}
		}},
		"stopped NATS": {"event-log", Error, "registry h/4 does not reach the event log in NATS", func(in *Input) {
			state(in, func(st *registry.State) { st.Logs[0].Error = "refused" })
		}},
		"NATS without a quorum": {"event-log", Error, "NATS has no quorum: 1 of 3 servers run: refused; again",
			func(in *Input) {
				in.Reports = append(in.Reports, &process.Report{Services: []string{"nats"}, Version: "v1"})
				state(in, func(st *registry.State) {
					st.Logs[0].Failure, st.Logs[0].Wanted = "refused\nagain", 3
					other := registry.LogState{Log: "crds", Publishing: true, Error: "timeout", Wanted: 3}
					st.Logs = append(st.Logs, other)
				})
			}},
		"NATS with a full disk": {"event-log", Error, "registry h/4 cannot publish the event log: no space",
			func(in *Input) {
				state(in, func(st *registry.State) { st.Logs[0].Failure = "no space left on device" })
			}},
		"no publisher": {"event-log", Error, "no registry publishes the event log", func(in *Input) {
			state(in, func(st *registry.State) { st.Logs[0].Publishing = false })
		}},
		"a stopped NATS server": {"event-log", Warning, "has 2 of 3 replicas", func(in *Input) {
			state(in, func(st *registry.State) { st.Logs[0].Current, st.Logs[0].Wanted = 2, 3 })
		}},
		"small event log": {"event-log", Warning, "watches resume over 60 s", func(in *Input) {
			state(in, func(st *registry.State) {
				l := &st.Logs[0]
				l.Bytes, l.MaxBytes, l.OldestSeconds, l.RetentionSeconds = 95, 100, 60, 600
			})
		}},
		"lagging replica": {"watch-tier", Error, "watchfanout h/6 is 40 revisions behind", func(in *Input) {
			late := *in.Reports[other]
			set(t, &late, &watchfanout.Status{Revision: 60, Behind: 40})
			in.Reports[other], in.Later[other] = &late, &late
		}},
		"objects that differ": {"objects", Error, "differs from etcd in pods at revision 7: 1 objects are missing, 2 do " +
			"not exist, 3 have another revision", func(in *Input) {
			compared(in, logreader.Comparison{Differences: []logreader.Difference{{Resource: "pods", Revision: 7,
				Missing: 1, Extra: 2, Stale: 3, Reset: true}}})
		}},
		"objects that differ again": {"objects", Error, "differs from etcd in pods", func(in *Input) {
			compared(in, logreader.Comparison{Differences: []logreader.Difference{{Resource: "pods", Missing: 1}}})
		}},
		"objects that cannot be compared": {"objects", Warning, "watchfanout h/5 could not compare", func(in *Input) {
			compared(in, logreader.Comparison{Errors: []string{"pods: etcd does not respond"}})
		}},
		"dead webhook": {"webhooks", Error, "the Service a/b does not exist; requests that match it are rejected",
			func(in *Input) { in.Cluster.Webhooks[0].Problem = "the Service a/b does not exist" }},
		"webhook whose call failed": {"webhooks", Error, "the last call of admission h/3 failed", func(in *Input) {
			set(t, in.Reports[3], &admission.State{Failing: []admission.FailingWebhook{{Endpoint: "a.b.svc:443/"}}})
		}},
		"dead optional webhook": {"webhooks", Warning, "wait for its timeout", func(in *Input) {
			in.Cluster.Webhooks[0].Required, in.Cluster.Webhooks[0].Problem = false, "no endpoint"
		}},
		"dead APIService": {"apiservices", Error, "the APIService v1.apps is not available", func(in *Input) {
			in.Cluster.APIServices[0].Problem = "ServiceNotFound: gone"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			in := healthy(t)
			c.plant(in)
			all := Find(in)
			if !slices.ContainsFunc(all, func(f Finding) bool { return f.Check == c.check && f.Level > OK }) {
				t.Errorf("no finding of %s", c.check)
			}
			for _, f := range all {
				switch {
				case f.Check != c.check && f.Level != OK:
					t.Errorf("another finding: %+v", f)
				case f.Level == OK || f.Check != c.check:
				case f.Level != c.level || !strings.Contains(f.Problem, c.text) || f.Remedy == "" ||
					f.Docs != page+c.check:
					t.Errorf("%+v, want %v %q", f, c.level, c.text)
				}
			}
		})
	}
}

// With --deep, replicas that have compared nothing are skipped. Without it, the check of objects has no finding.
func TestComparisonsThatAreMissing(t *testing.T) {
	in := healthy(t)
	in.Deep[5].States = nil
	set(t, in.Deep[6], &watchfanout.Status{Compared: []*logreader.Comparison{{Disabled: true}}})
	skipped := 0
	for _, f := range Find(in) {
		if f.Check == "objects" && f.Level == Skipped {
			skipped++
		}
	}
	if skipped != 2 {
		t.Errorf("%d replicas are skipped: %+v", skipped, objects(in))
	}
	in.Deep = nil
	for _, f := range Find(in) {
		if f.Check == "objects" {
			t.Errorf("without --deep: %+v", f)
		}
	}
}

// A replica that has caught up within the pause does not lag.
func TestACaughtUpReplicaIsOK(t *testing.T) {
	in := healthy(t)
	before := *in.Reports[5]
	set(t, &before, &watchfanout.Status{Revision: 90, Behind: 10})
	in.Reports[5] = &before
	if all := Find(in); Worst(all) != OK {
		t.Errorf("%+v", all)
	}
}

// Without reports or rights, checks are skipped and the reason is the only fault.
func TestSkippedChecks(t *testing.T) {
	all := Find(&Input{Now: now, ReportsError: errors.New("connection refused"), ClusterError: errors.New("forbidden")})
	faults, skipped := 0, 0
	for _, f := range all {
		switch f.Level {
		case Error:
			faults++
		case Skipped:
			skipped++
		}
	}
	if faults != 1 || skipped < 8 {
		t.Errorf("%d faults, %d skipped: %+v", faults, skipped, all)
	}
}

// A line has the level, the check, the problem, the remedy and the link.
func TestPrint(t *testing.T) {
	var out strings.Builder
	Print(&out, []Finding{{"etcd", Error, "a", "B.", "docs/operators/check.md#etcd"}, {Check: "disks", Problem: "c"}})
	want := "error   etcd         a. B. [docs/operators/check.md#etcd]\nok      disks        c\n\n" +
		"errors: 1, warnings: 0, skipped: 0\n"
	if out.String() != want {
		t.Errorf("%q", out.String())
	}
}
