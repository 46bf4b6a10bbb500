package check

import (
	"crypto/x509"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
)

func processes(in *Input) (found []Finding) {
	if in.ReportsError != nil && !ofTLS(in.ReportsError.Error()) {
		found = append(found, fault(Error, "Start Watershed, or correct --kubeconfig or --data-dir.",
			"the processes cannot be read: %v", in.ReportsError))
	}
	running := map[string]bool{}
	for _, r := range in.Reports {
		for _, s := range r.Services {
			running[s] = true
		}
		if r.Error != "" && !ofTLS(r.Error) {
			found = append(found, fault(Error, "Start the process again; its log has the reason.",
				"%s does not respond: %s", label(r), r.Error))
		}
		for _, s := range slices.Sorted(maps.Keys(r.NotReady)) {
			found = append(found, fault(Error, "Fix the cause; the log of the process has more.",
				"%s is not ready: %s: %s", label(r), s, r.NotReady[s]))
		}
	}
	for _, s := range services {
		if len(in.Reports) > 0 && !running[s] {
			found = append(found, fault(Error, "Start "+s+", or correct its addresses.", "no process runs %s", s))
		}
	}
	return found
}

// services are the services of Watershed.
var services = []string{"gateway", "authn", "authz", "admission", "registry", "watchfanout"}

func versions(in *Input) []Finding {
	by := map[string][]string{}
	for _, r := range responding(in.Reports) {
		by[r.Version] = append(by[r.Version], label(r))
	}
	if len(by) < 2 {
		return noReports(in)
	}
	return []Finding{fault(Warning, "Complete the upgrade, or roll it back.",
		"the processes have %d versions: %s", len(by), values(by))}
}

// values describes the processes of each value.
func values(by map[string][]string) string {
	var all []string
	for _, v := range slices.Sorted(maps.Keys(by)) {
		names := by[v]
		slices.Sort(names)
		if len(names) > 3 {
			names = append(names[:3:3], fmt.Sprintf("%d more", len(names)-3))
		}
		all = append(all, fmt.Sprintf("%q (%s)", v, strings.Join(names, "; ")))
	}
	return strings.Join(all, ", ")
}

// perProcess matches the flags that differ between the processes of a service by design. Each host of `up` also has a
// port and an event log of its own.
var (
	perProcess = regexp.MustCompile(`(^|-)address(es)?$|-dir$|^(listen|advertise)-.*-urls$|` +
		`^(audit-log-path|cluster-advertise|config|external-hostname|initial-advertise-peer-urls|initial-cluster-state|` +
		`name|state-file|tls-sans)$`)
	perHost = []string{"log-name", "secure-port"}
)

// unset is the displayed value of a flag that a process does not set.
const unset = "not set"

func flags(in *Input) (found []Finding) {
	groups := map[string][]*process.Report{}
	for _, r := range responding(in.Reports) {
		key := strings.Join(r.Services, ",")
		groups[key] = append(groups[key], r)
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		names := map[string]bool{}
		for _, r := range groups[key] {
			for name := range r.Flags {
				up := len(r.Services) == len(services)
				names[name] = !perProcess.MatchString(name) && !(up && slices.Contains(perHost, name))
			}
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			by := map[string][]string{}
			for _, r := range groups[key] {
				v, ok := r.Flags[name]
				if !ok {
					v = unset
				}
				by[v] = append(by[v], r.Name())
			}
			if names[name] && len(by) > 1 {
				found = append(found, fault(Warning, "Set the same value, and restart the processes.",
					"--%s differs between processes of %s: %s", name, key, values(by)))
			}
		}
	}
	if found == nil {
		found = noReports(in)
	}
	return found
}

// endsSoon is the remaining validity below which a certificate ends soon, if it is also below a fifth of its lifetime.
const endsSoon = 14 * 24 * time.Hour

func certificates(in *Input) (found []Finding) {
	for _, r := range in.Reports {
		for _, c := range r.Certificates {
			found = append(found, validity(in.Now, label(r), c)...)
		}
	}
	found = append(found, ownCertificates(in)...)
	if len(in.Serving) > 0 {
		found = append(found, validity(in.Now, in.Server, pki.Of("", in.Serving[0]))...)
	} else if found == nil {
		found = noReports(in)
	}
	return found
}

// ownCertificates returns the faults of the certificates in the files of this command's flags.
func ownCertificates(in *Input) (found []Finding) {
	for _, c := range in.Certificates {
		found = append(found, validity(in.Now, "this command", c)...)
	}
	return found
}

// validity returns the fault of a certificate, or nothing. of names the process or server that has it.
func validity(now time.Time, of string, c pki.Described) []Finding {
	name := fmt.Sprintf("%s (%s of %s, %s)", c.File, c.Flag, of, c.Subject)
	if c.File == "" {
		name = fmt.Sprintf("the certificate of %s (%s)", of, c.Subject)
	}
	const issue = "Issue a new certificate at the same path; the process reloads it."
	switch remaining := c.NotAfter.Sub(now); {
	case c.NotAfter.IsZero():
		return []Finding{fault(Error, "Correct the flag or the file.",
			"%s (%s of %s) cannot be read: %s", c.File, c.Flag, of, c.Error)}
	case remaining < 0:
		return []Finding{fault(Error, issue, "%s ended on %s", name, day(c.NotAfter))}
	case c.NotBefore.After(now):
		return []Finding{fault(Error, "Correct the clocks, or issue a new certificate.",
			"%s is not valid before %s", name, c.NotBefore.UTC().Format(time.RFC3339))}
	case remaining < endsSoon && remaining < c.NotAfter.Sub(c.NotBefore)/5:
		return []Finding{fault(Warning, issue, "%s ends on %s", name, day(c.NotAfter))}
	}
	return nil
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }

func authorities(in *Input) (found []Finding) {
	for _, r := range in.Reports {
		if r.Error != "" && ofTLS(r.Error) {
			found = append(found, fault(Error,
				"Give the process a certificate of the inner CA, and the same --rpc-ca-file as the others.",
				"%s and the gateway do not accept each other's certificates: %s", label(r), r.Error))
		}
		for _, c := range r.Certificates {
			if c.Error != "" && !c.NotAfter.IsZero() {
				found = append(found, fault(Error, "Give the process a certificate and a CA that belong together.",
					"%s (%s of %s): %s", c.File, c.Flag, label(r), c.Error))
			}
		}
	}
	if len(in.Serving) > 0 && in.Roots != nil {
		if err := verifyServing(in); err != nil {
			found = append(found, fault(Error,
				"Set certificate-authority in the kubeconfig to the CA of --tls-cert-file, or correct the certificate.",
				"the kubeconfig's CA has not signed the certificate of %s: %v", in.Server, err))
		}
	}
	if err := in.ReportsError; err != nil && ofTLS(err.Error()) && found == nil {
		found = append(found, fault(Error, "Correct the certificates of the kubeconfig or of the gateway.",
			"the processes cannot be read: %v", err))
	}
	if in.Etcd != nil {
		for _, m := range in.Etcd.Members {
			if ofTLS(m.Error) {
				found = append(found, fault(Error, "Set --etcd-cafile to the CA of etcd's certificate.",
					"etcd at %s: %s", m.Endpoint, m.Error))
			}
		}
	}
	return found
}

// verifyServing verifies the gateway's serving certificate with the CA of the kubeconfig. The end of the certificate is
// a finding of its own.
func verifyServing(in *Input) error {
	intermediates := x509.NewCertPool()
	for _, c := range in.Serving[1:] {
		intermediates.AddCert(c)
	}
	leaf := in.Serving[0]
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:         in.Roots,
		Intermediates: intermediates,
		CurrentTime:   pki.TimeWithin(leaf),
	})
	return err
}

// Differences of clocks in seconds above which there is a warning or an error. Leases in etcd do not depend on clocks;
// certificates, tokens and the age of policy do.
const (
	skewWarning = 1.0
	skewError   = 5.0
)

func clocks(in *Input) (found []Finding) {
	for _, r := range responding(in.Reports) {
		var level Level
		switch skew := math.Abs(r.SkewSeconds); {
		case skew > skewError:
			level = Error
		case skew > skewWarning:
			level = Warning
		default:
			continue
		}
		found = append(found, fault(level, "Synchronize the clocks with NTP.",
			"the clock of %s differs by %.1f s", label(r), r.SkewSeconds))
	}
	if found == nil {
		found = noReports(in)
	}
	return found
}

func disks(in *Input) (found []Finding) {
	const mib = 1 << 20
	for _, r := range in.Reports {
		for _, d := range r.Disks {
			var level Level
			switch {
			case d.FreeBytes < 256*mib && d.FreeBytes < d.TotalBytes/10:
				level = Error
			case d.FreeBytes < 1024*mib && d.FreeBytes < d.TotalBytes/10, d.FreeBytes < d.TotalBytes/20:
				level = Warning
			default:
				continue
			}
			found = append(found, fault(level, "Free space or enlarge the disk: etcd and NATS stop on a full disk.",
				"the disk of %s (%s of %s) has %d MiB free of %d", d.Path, d.Flag, label(r), d.FreeBytes/mib,
				d.TotalBytes/mib))
		}
	}
	if found == nil {
		found = noReports(in)
	}
	return found
}
