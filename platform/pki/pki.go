// Package pki creates and stores the certificates and keys of a cluster on disk. It never replaces an existing CA or
// key, and renews a leaf well before it expires. It does not watch files or distribute them, and starts no goroutine.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	// caLifetime is the validity of a CA.
	caLifetime = 10 * 365 * 24 * time.Hour
	// clockTolerance is how much later the clock may be that has created a CA.
	clockTolerance = 5 * time.Minute
)

// CA is a certificate authority with its key.
type CA struct {
	Dir, Name string
	cert      *x509.Certificate
	key       crypto.Signer
}

// OpenCA reads dir/name.crt and dir/name.key, or creates both.
func OpenCA(dir, name, commonName string) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ca := &CA{Dir: dir, Name: name}
	crt, key := filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if !exists(crt) {
		if exists(key) {
			return nil, fmt.Errorf("%s exists but %s does not: restore it, or remove both to create a new CA", key, crt)
		}
		k, err := rsa.GenerateKey(rand.Reader, 2048) // some clients of a cluster CA support only RSA
		if err != nil {
			return nil, err
		}
		t := template(commonName, nil, caLifetime)
		t.IsCA, t.BasicConstraintsValid = true, true
		t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
		t.DNSNames = []string{commonName}
		if err := write(crt, key, t, t, k, k); err != nil {
			return nil, err
		}
	}
	pair, err := tls.LoadX509KeyPair(crt, key)
	if err != nil {
		return nil, fmt.Errorf("read CA %s: %w", crt, err)
	}
	if ca.cert, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
		return nil, err
	}
	if now := time.Now(); now.Add(clockTolerance).Before(ca.cert.NotBefore) || now.After(ca.cert.NotAfter) {
		return nil, fmt.Errorf("CA %s is valid from %s to %s only: correct the clock, or remove it and %s to create a "+
			"new CA", crt, ca.cert.NotBefore.Format(time.DateTime), ca.cert.NotAfter.Format(time.DateTime), key)
	}
	ca.key = pair.PrivateKey.(crypto.Signer)
	return ca, nil
}

// CertFile returns the path of the CA certificate.
func (c *CA) CertFile() string { return filepath.Join(c.Dir, c.Name+".crt") }

// Usage is the set of extended key usages of a certificate.
type Usage int

// The usages of a leaf.
const (
	Client Usage = 1 << iota
	Server
)

func (u Usage) extended() (out []x509.ExtKeyUsage) {
	if u&Client != 0 {
		out = append(out, x509.ExtKeyUsageClientAuth)
	}
	if u&Server != 0 {
		out = append(out, x509.ExtKeyUsageServerAuth)
	}
	return out
}

// Leaf describes a certificate that a CA signs.
type Leaf struct {
	// Name is the name of the leaf's files, without .crt and .key.
	Name          string
	CommonName    string
	Organizations []string
	// SANs holds the DNS names and IP addresses of the certificate.
	SANs  []string
	Usage Usage
}

const (
	// leafLifetime is the validity of a leaf. The leaf is renewed after the fraction renewAfter of it.
	leafLifetime = 365 * 24 * time.Hour
	renewAfter   = 0.6
)

// Leaf creates the files of a leaf, or leaves existing files that match l and are young enough. created is true if it
// created them.
func (c *CA) Leaf(l Leaf) (crtFile, keyFile string, created bool, err error) {
	crtFile, keyFile = filepath.Join(c.Dir, l.Name+".crt"), filepath.Join(c.Dir, l.Name+".key")
	_, err = tls.LoadX509KeyPair(crtFile, keyFile)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return "", "", false, err
	case err == nil && c.isCurrent(crtFile, l):
		return crtFile, keyFile, false, nil
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", false, err
	}
	t := template(l.CommonName, l.Organizations, leafLifetime)
	if t.NotAfter.After(c.cert.NotAfter) {
		t.NotAfter = c.cert.NotAfter
	}
	t.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
	t.ExtKeyUsage = l.Usage.extended()
	for _, s := range l.SANs {
		if ip := net.ParseIP(s); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, s)
		}
	}
	return crtFile, keyFile, true, write(crtFile, keyFile, t, c.cert, k, c.key)
}

// isCurrent returns true if an existing certificate is signed by the CA, matches l, and is young enough.
func (c *CA) isCurrent(crtFile string, l Leaf) bool {
	b, err := os.ReadFile(crtFile)
	if err != nil {
		return false
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || cert.CheckSignatureFrom(c.cert) != nil {
		return false
	}
	if time.Now().Before(cert.NotBefore) { // created while the clock was ahead
		return false
	}
	lifetime := cert.NotAfter.Sub(cert.NotBefore)
	if lifetime > leafLifetime+24*time.Hour || float64(time.Since(cert.NotBefore)) > renewAfter*float64(lifetime) {
		return false
	}
	if cert.Subject.CommonName != l.CommonName || !slices.Equal(cert.Subject.Organization, l.Organizations) ||
		!slices.Equal(cert.ExtKeyUsage, l.Usage.extended()) ||
		len(cert.DNSNames)+len(cert.IPAddresses) != len(l.SANs) {
		return false
	}
	for _, s := range l.SANs {
		if cert.VerifyHostname(s) != nil {
			return false
		}
	}
	return true
}

// SecretKey creates a file with a random key of 256 bits in hexadecimal, unless the file exists.
func SecretKey(path string) error {
	if exists(path) {
		return nil
	}
	var key [32]byte
	_, _ = rand.Read(key[:]) // Read never fails
	return WriteFile(path, []byte(hex.EncodeToString(key[:])+"\n"), 0o600)
}

// WriteFile replaces a file atomically: a concurrent reader, and a reader after a power loss, reads the old or the new
// content. It leaves a file that has the content and the mode.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	if info, err := os.Lstat(path); err == nil && info.Mode() == mode {
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
			return nil
		}
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// ServiceAccountKeys creates dir/sa.key and dir/sa.pub, unless both exist.
func ServiceAccountKeys(dir string) (keyFile, pubFile string, err error) {
	keyFile, pubFile = filepath.Join(dir, "sa.key"), filepath.Join(dir, "sa.pub")
	if exists(keyFile) && exists(pubFile) {
		return keyFile, pubFile, nil
	}
	if exists(keyFile) || exists(pubFile) {
		const text = "%s or %s is missing: restore it, or remove both, which invalidates every token"
		return "", "", fmt.Errorf(text, keyFile, pubFile)
	}
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return "", "", err
	}
	pub, err := x509.MarshalPKIXPublicKey(&k.PublicKey)
	if err != nil {
		return "", "", err
	}
	if err := writePEM(keyFile, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(k), 0o600); err != nil {
		return "", "", err
	}
	return keyFile, pubFile, writePEM(pubFile, "PUBLIC KEY", pub, 0o644)
}

func template(commonName string, organizations []string, lifetime time.Duration) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: commonName, Organization: organizations},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(lifetime),
	}
}

func write(crt, key string, t, parent *x509.Certificate, k, signer crypto.Signer) error {
	der, err := x509.CreateCertificate(rand.Reader, t, parent, k.Public(), signer)
	if err != nil {
		return err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return err
	}
	if err := writePEM(key, "PRIVATE KEY", pkcs8, 0o600); err != nil {
		return err
	}
	return writePEM(crt, "CERTIFICATE", der, 0o644)
}

func writePEM(path, kind string, der []byte, mode fs.FileMode) error {
	return WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
