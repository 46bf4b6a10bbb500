package check

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"watershed.dev/platform/process"
	"watershed.dev/services/registry"
	"watershed.dev/services/registry/etcdstatus"
	"watershed.dev/services/watchfanout"
)

// registries returns the states of all registries, by the label of the process.
func registries(all []*process.Report) map[string]*registry.State {
	states := map[string]*registry.State{}
	for _, r := range responding(all) {
		if st := new(registry.State); r.State("registry", st) {
			states[label(r)] = st
		}
	}
	return states
}

func etcd(in *Input) (found []Finding) {
	states := registries(in.Reports)
	if in.Etcd != nil {
		found = append(found, etcdFaults("this command", in.Etcd)...)
	}
	for _, name := range slices.Sorted(maps.Keys(states)) {
		for _, st := range states[name].Etcds {
			found = append(found, etcdFaults(name, &st)...)
		}
	}
	if len(states) == 0 && in.Etcd == nil {
		return []Finding{fault(Skipped, "", "no registry has sent a report; --etcd-servers reads etcd itself")}
	}
	return found
}

// Bounds of etcd's linearizable reads in seconds, and the share of the quota, above which there is a finding.
const (
	readWarning = 0.1
	readError   = 1.0
	quotaShare  = 0.8
)

// progressOvertakesEvents reports whether a version of etcd has the faults etcd 15220 and 17507. kube-apiserver then
// requests no progress (k8s.io/apiserver/pkg/storage/feature).
func progressOvertakesEvents(etcd string) bool {
	v, err := version.ParseSemantic(etcd)
	if err != nil {
		return false
	}
	return v.LessThan(version.MustParseSemantic("3.4.31")) ||
		v.AtLeast(version.MustParseSemantic("3.5.0")) && v.LessThan(version.MustParseSemantic("3.5.13"))
}

// etcdFaults returns the faults of an etcd as a process sees it.
func etcdFaults(from string, s *etcdstatus.Status) (found []Finding) {
	down, leader, versions := 0, false, map[string]bool{}
	for _, m := range s.Members {
		leader = leader || m.HasLeader
		if m.Error != "" {
			down++
			continue
		}
		versions[m.Version] = true
		if progressOvertakesEvents(m.Version) {
			found = append(found, fault(Error, "Upgrade etcd to 3.5.13 or later.",
				"etcd %s has the version %s, which may send progress before events: watches can lose events",
				m.Endpoint, m.Version))
		}
		if m.QuotaBytes > 0 && float64(m.Bytes) > quotaShare*float64(m.QuotaBytes) {
			found = append(found, fault(Warning,
				"Delete objects and defragment etcd. An etcd of your own has --quota-backend-bytes.",
				"the database of etcd %s has %d MB of %d MB, %d MB in use", m.Endpoint, m.Bytes/1e6, m.QuotaBytes/1e6,
				m.InUseBytes/1e6))
		}
		for _, e := range m.Errors {
			found = append(found, fault(Warning, "Look at the member's log.", "etcd %s: %s", m.Endpoint, e))
		}
	}
	for _, m := range s.Members {
		if m.Error != "" && down < len(s.Members) {
			found = append(found, fault(Warning, "Start the member, or replace it.",
				"etcd %s does not respond to %s: %s", m.Endpoint, from, m.Error))
		}
	}
	servers := strings.Join(s.Servers, ",")
	switch {
	case s.Error != "" && down == len(s.Members):
		found = append(found, fault(Error, "Start etcd, or correct --etcd-servers and its certificates.",
			"no member of etcd %s responds to %s: %s", servers, from, s.Error))
	case s.Error != "" && !leader:
		found = append(found, fault(Error, "Start members until more than half run, or restore a snapshot.",
			"etcd %s has no quorum and no leader (%d voting members): %s", servers, s.Voting, s.Error))
	case s.Error != "":
		found = append(found, fault(Error, "Look at the logs and disks of etcd.",
			"etcd %s does not respond to a linearizable read of %s: %s", servers, from, s.Error))
	case s.ReadSeconds > readError:
		found = append(found, fault(Error, "Give etcd a faster disk or more CPU.",
			"a linearizable read of etcd %s took %.2f s", servers, s.ReadSeconds))
	case s.ReadSeconds > readWarning:
		found = append(found, fault(Warning, "Give etcd a faster disk or more CPU.",
			"a linearizable read of etcd %s took %.2f s", servers, s.ReadSeconds))
	}
	if len(versions) > 1 {
		found = append(found, fault(Warning, "Complete the upgrade of etcd.",
			"the members of etcd have the versions %s", strings.Join(slices.Sorted(maps.Keys(versions)), " and ")))
	}
	for _, alarm := range s.Alarms {
		remedy := "Look at etcd's log."
		if alarm == "NOSPACE" {
			remedy = "Delete objects and defragment etcd, then run etcdctl alarm disarm."
		}
		found = append(found, fault(Error, remedy, "etcd %s has the alarm %s: it rejects writes", servers, alarm))
	}
	return found
}

func eventLog(in *Input) (found []Finding) {
	states := registries(in.Reports)
	if len(states) == 0 {
		return []Finding{fault(Skipped, "", "no registry has sent a report")}
	}
	servers := 0
	for _, r := range responding(in.Reports) {
		if slices.Contains(r.Services, "nats") {
			servers++
		}
	}
	publishing := map[string]bool{}
	quorum := true
	for _, name := range slices.Sorted(maps.Keys(states)) {
		for _, l := range states[name].Logs {
			publishing[l.Log] = publishing[l.Log] || l.Publishing
			fails := cmp.Or(l.Error, l.Failure)
			switch log := logName(l.Log); {
			case fails != "" && l.Leader == "" && servers > 0 && 2*servers <= l.Wanted:
				if !quorum { // another log or registry has the finding
					continue
				}
				quorum = false
				found = append(found, fault(Error, "Start NATS servers until more than half run.",
					"NATS has no quorum: %d of %d servers run: %s", servers, l.Wanted, fails))
			case l.Error != "":
				found = append(found, fault(Error, "Start NATS, or correct --nats-url and its certificates.",
					"%s does not reach %s in NATS: %s", name, log, l.Error))
			case l.Failure != "":
				found = append(found, fault(Error, "Look at the disk, the memory and the log of NATS.",
					"%s cannot publish %s: %s", name, log, l.Failure))
			case l.Current < l.Wanted:
				found = append(found, fault(Warning, "Start the other NATS servers.",
					"%s has %d of %d replicas in NATS", log, l.Current, l.Wanted))
			case l.MaxBytes > 0 && l.Bytes > uint64(l.MaxBytes)/10*9 && l.OldestSeconds < l.RetentionSeconds/2:
				found = append(found, fault(Warning, "Raise --log-max-bytes.",
					"%s is full: watches resume over %.0f s, and --log-retention is %.0f s", log, l.OldestSeconds,
					l.RetentionSeconds))
			}
		}
	}
	for _, log := range slices.Sorted(maps.Keys(publishing)) {
		if !publishing[log] {
			found = append(found, fault(Error, "Look at the registries' logs: an election needs etcd.",
				"no registry publishes %s", logName(log)))
		}
	}
	return found
}

func logName(id string) string {
	if id == "" {
		return "the event log"
	}
	return fmt.Sprintf("the event log %q", id)
}

// watchTier compares each replica's revision after the pause with etcd's before it.
func watchTier(in *Input) (found []Finding) {
	replicas := func(all []*process.Report) map[string]*watchfanout.Status {
		states := map[string]*watchfanout.Status{}
		for _, r := range responding(all) {
			if st := new(watchfanout.Status); r.State("watchfanout", st) {
				states[label(r)] = st
			}
		}
		return states
	}
	before, after := replicas(in.Reports), replicas(in.Later)
	newest := int64(0)
	for _, st := range before {
		if st.Behind >= 0 {
			newest = max(newest, st.Revision+st.Behind)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(after)) {
		st := after[name]
		if lag := newest - st.Revision; lag > 0 {
			found = append(found, fault(Error, "Look at the replica's connection to NATS and its CPU, or restart it.",
				"%s is %d revisions behind etcd after %s", name, lag, Pause))
		}
	}
	if len(after) == 0 {
		return []Finding{fault(Skipped, "", "no replica has sent a report")}
	}
	return found
}
