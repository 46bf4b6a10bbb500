package check

import (
	"slices"

	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/services/watchfanout"
)

// objects reads the comparisons of the watch tier's replicas with etcd, which --deep requests.
func objects(in *Input) (found []Finding) {
	if in.DeepError != nil {
		return []Finding{fault(Skipped, "", "no process has sent a deep report: %v", in.DeepError)}
	}
	replicas, resources, count, values := 0, 0, 0, 0
	for _, r := range in.Deep {
		name := label(r)
		if !slices.Contains(r.Services, "watchfanout") {
			continue
		}
		st := new(watchfanout.Status)
		switch {
		case r.Error != "":
			found = append(found, fault(Skipped, "", "%s has not compared its objects: %s", name, r.Error))
			continue
		case !r.State("watchfanout", st) || len(st.Compared) == 0:
			found = append(found, fault(Skipped, "", "%s has not compared its objects: it is another host of up, "+
				"or of an older release", name))
			continue
		}
		replicas++
		for _, c := range st.Compared {
			resources, count, values = resources+c.Resources, count+c.Objects, values+c.Values
			found = append(found, comparison(name, c)...)
		}
	}
	if replicas > 0 {
		found = append(found, fault(OK, "", "%d replicas have compared %d objects of %d resources with etcd, %d of them "+
			"with their values", replicas, count, resources, values))
	}
	return found
}

// comparison returns the faults that a replica found.
func comparison(name string, c *logreader.Comparison) (found []Finding) {
	for _, d := range c.Differences {
		remedy := "The replica has reset the resource. Its log names the objects; report them as a bug."
		if !d.Reset {
			remedy = "Restart the replica, which has reset the resource within the last hour. Its log names the objects; " +
				"report them as a bug."
		}
		found = append(found, fault(Error, remedy, "%s differs from etcd in %s at revision %d: %d objects are missing, "+
			"%d do not exist, %d have another revision, %d have another value", name, d.Resource, d.Revision, d.Missing,
			d.Extra, d.Stale, d.Altered))
	}
	for _, e := range c.Errors {
		found = append(found, fault(Warning, "Repeat the check. Look at the logs of the replica and of registry.",
			"%s could not compare its objects with etcd's: %s", name, e))
	}
	if c.Disabled {
		found = append(found, fault(Skipped, "", "registry refuses %s the comparison: the feature gate "+
			"DetectCacheInconsistency is off, or registry is of an older release", name))
	}
	return found
}
