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
	switch {
	case exists(crt):
	case exists(key):
		if _, err := tls.LoadX509KeyPair(crt+temporary, key); err != nil {
			return nil, fmt.Errorf("%s exists but %s does not: restore it, or remove both to create a new CA", key, crt)
		}
		if err := os.Rename(crt+temporary, crt); err != nil { // writePair was interrupted
			return nil, err
		}
	default:
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
	if err := writeTemporary(path, data, mode); err != nil {
		return err
	}
	return os.Rename(path+temporary, path)
}

// temporary is the suffix of a file that is not complete.
const temporary = ".new"

func writeTemporary(path string, data []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path+temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// writePair writes a key and its public part. It renames the files when both are complete, the key first. A key without
// a public part therefore has a complete temporary file beside it.
func writePair(keyFile, publicFile string, key, public *pem.Block) error {
	if err := writeTemporary(keyFile, pem.EncodeToMemory(key), 0o600); err != nil {
		return err
	}
	if err := writeTemporary(publicFile, pem.EncodeToMemory(public), 0o644); err != nil {
		return err
	}
	if err := os.Rename(keyFile+temporary, keyFile); err != nil {
		return err
	}
	return os.Rename(publicFile+temporary, publicFile)
}

// ServiceAccountKeys creates dir/sa.key and dir/sa.pub, unless both exist.
func ServiceAccountKeys(dir string) (keyFile, pubFile string, err error) {
	keyFile, pubFile = filepath.Join(dir, "sa.key"), filepath.Join(dir, "sa.pub")
	if exists(keyFile) && exists(pubFile) {
		return keyFile, pubFile, nil
	}
	if exists(keyFile) && belongTogether(keyFile, pubFile+temporary) { // writePair was interrupted
		return keyFile, pubFile, os.Rename(pubFile+temporary, pubFile)
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
	return keyFile, pubFile, writePair(keyFile, pubFile,
		&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(k)},
		&pem.Block{Type: "PUBLIC KEY", Bytes: pub})
}

// belongTogether reports whether a file has the public key of an RSA key.
func belongTogether(keyFile, pubFile string) bool {
	key, keyErr := os.ReadFile(keyFile)
	pub, pubErr := os.ReadFile(pubFile)
	keyBlock, _ := pem.Decode(key)
	pubBlock, _ := pem.Decode(pub)
	if keyErr != nil || pubErr != nil || keyBlock == nil || pubBlock == nil {
		return false
	}
	k, err := x509.ParsePKCS1PrivateKey(keyBlock.Bytes)
	if err != nil {
		return false
	}
	want, err := x509.MarshalPKIXPublicKey(&k.PublicKey)
	return err == nil && bytes.Equal(pubBlock.Bytes, want)
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
	return writePair(key, crt, &pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8},
		&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
