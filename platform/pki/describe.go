package pki

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"
)

// Described is a certificate in a file that a flag names.
type Described struct {
	Flag    string `json:"flag"`
	File    string `json:"file"`
	Subject string `json:"subject,omitempty"`
	// NotBefore and NotAfter bound the validity.
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
	// Error is why the file cannot be read or the certificate cannot be verified.
	Error string `json:"error,omitempty"`
}

// maxDescribed bounds the size of a described file in bytes.
const maxDescribed = 1 << 20

// Describe describes the certificates in a PEM file. A file without certificates, or that is not Describable, has none.
func Describe(flag, file string) (all []Described) {
	certs, err := certificates(file)
	if err != nil {
		return []Described{{Flag: flag, File: file, Error: err.Error()}}
	}
	for _, c := range certs {
		all = append(all, describe(flag, file, c))
	}
	return all
}

// DescribeSigned describes the first certificate of a file, and verifies that a CA of another file has signed it.
func DescribeSigned(flag, file, caFile string) []Described {
	certs, err := certificates(file)
	roots := x509.NewCertPool()
	if err == nil {
		var cas []*x509.Certificate
		cas, err = certificates(caFile)
		for _, ca := range cas {
			roots.AddCert(ca)
		}
	}
	if err != nil || len(certs) == 0 {
		return []Described{{Flag: flag, File: file, Error: fmt.Sprint("no certificate: ", err)}}
	}
	d := describe(flag, file, certs[0])
	intermediates := x509.NewCertPool()
	for _, c := range certs[1:] {
		intermediates.AddCert(c)
	}
	if _, err := certs[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		CurrentTime:   TimeWithin(certs[0]), // its end is a problem of its own
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}); err != nil {
		d.Error = fmt.Sprintf("the CA in %s has not signed it: %v", caFile, err)
	}
	return []Described{d}
}

// TimeWithin returns the time within the validity of a certificate that is nearest to now. A verification at this time
// does not depend on the end of the certificate. The certificate's CA may be younger: a replaced CA signs certificates
// whose validity begins an hour earlier.
func TimeWithin(c *x509.Certificate) time.Time {
	now, first, last := time.Now(), c.NotBefore.Add(time.Second), c.NotAfter.Add(-time.Second)
	switch {
	case now.Before(first):
		return first
	case now.After(last):
		return last
	}
	return now
}

// Of describes a certificate that has no file.
func Of(flag string, c *x509.Certificate) Described { return describe(flag, "", c) }

func describe(flag, file string, c *x509.Certificate) Described {
	return Described{Flag: flag, File: file, Subject: c.Subject.String(), NotBefore: c.NotBefore, NotAfter: c.NotAfter}
}

// Describable reports whether Describe reads a file: a regular file of at most 1 MB.
func Describable(file string) bool {
	ok, _ := describable(file)
	return ok
}

func describable(file string) (bool, error) {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Size() <= maxDescribed, err
}

// certificates returns the certificates in a PEM file.
func certificates(file string) (all []*x509.Certificate, err error) {
	if ok, err := describable(file); !ok {
		return nil, err
	}
	rest, err := os.ReadFile(file)
	for err == nil {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		var c *x509.Certificate
		if c, err = x509.ParseCertificate(block.Bytes); err == nil {
			all = append(all, c)
		}
	}
	return all, err
}

// ReadCertPool reads the certificates of a file in PEM. flag is the flag that names the file, for errors.
func ReadCertPool(flag, file string) (*x509.CertPool, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("--%s %q holds no PEM certificate", flag, file)
	}
	return pool, nil
}
