package process

import (
	"os"
	"regexp"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
)

// certificateFlag matches the names of flags whose values are files with certificates, without the inner network's.
var certificateFlag = regexp.MustCompile(
	`^(client-ca-file|requestheader-client-ca-file|tls-cert-file|etcd-(cert|ca)file|kubelet-certificate-authority|` +
		`kubelet-client-certificate|proxy-client-cert-file|services-(tls-cert|client-ca)-file|oidc-ca-file|` +
		`tracing-ca-file)$`)

// clientCertificate matches the client certificate's file in a kubeconfig of certgen. watchfanout links this package,
// and must not link client-go's parser.
var clientCertificate = regexp.MustCompile(`(?m)^\s*client-certificate: (\S+)$`)

// certificates describes the certificates in the files that flags name, and the identities on the inner network.
func (p *Process) certificates() (all []pki.Described) {
	if p.flags == nil {
		return nil
	}
	p.flags.VisitAll(func(f *pflag.Flag) {
		path := f.Value.String()
		if path != "" && certificateFlag.MatchString(f.Name) {
			all = append(all, pki.Describe("--"+f.Name, path)...)
		}
	})
	for _, s := range p.services {
		id := p.identity(s.Name)
		if id.CertFile == "" {
			continue
		}
		all = append(all, pki.DescribeSigned("--rpc-cert-file", id.CertFile, id.CAFile)...)
		kubeconfig, _ := s.flags.GetString("kubeconfig")
		text, _ := os.ReadFile(kubeconfig) // of a process with the gateway, it need not exist
		if m := clientCertificate.FindSubmatch(text); m != nil {
			all = append(all, pki.Describe("--kubeconfig", string(m[1]))...)
		}
	}
	return all
}

// expirations collects when the certificates of a process expire. It reads their files at each scrape.
type expirations struct {
	*prometheus.GaugeVec
	process *Process
	// scrape is held by a scrape, which replaces the values.
	scrape *sync.Mutex
}

func newExpirations(p *Process) prometheus.Collector {
	return expirations{prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_certificate_expiration_timestamp_seconds",
		Help: "When a certificate expires, in seconds since 1970, by the flag that names its file, by file and by subject.",
	}, []string{"flag", "file", "subject"}), p, &sync.Mutex{}}
}

// Collect implements prometheus.Collector.
func (e expirations) Collect(ch chan<- prometheus.Metric) {
	e.scrape.Lock()
	defer e.scrape.Unlock()
	e.Reset()
	for _, c := range e.process.certificates() {
		if !c.NotAfter.IsZero() {
			e.WithLabelValues(c.Flag, c.File, c.Subject).Set(float64(c.NotAfter.Unix()))
		}
	}
	e.GaugeVec.Collect(ch)
}
