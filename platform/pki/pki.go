// Package pki makes and keeps the certificates and keys of a cluster on disk. What exists is never replaced.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const validity = 10 * 365 * 24 * time.Hour

// CA is a certificate authority with its key.
type CA struct {
	Dir, Name string
	cert      *x509.Certificate
	key       crypto.Signer
}

// OpenCA reads dir/name.crt and dir/name.key, or makes them.
func OpenCA(dir, name, commonName string) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ca := &CA{Dir: dir, Name: name}
	crt, key := filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if !exists(crt) {
		k, err := rsa.GenerateKey(rand.Reader, 2048) // RSA: some clients of a cluster's CA know nothing else
		if err != nil {
			return nil, err
		}
		t := template(commonName, nil)
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
	ca.key = pair.PrivateKey.(crypto.Signer)
	return ca, nil
}

// CertFile is the CA certificate's path.
func (c *CA) CertFile() string { return filepath.Join(c.Dir, c.Name+".crt") }

// Leaf makes dir/name.crt and .key for the common name, organizations and subject alternative names (names or IPs),
// good as a client's and a server's certificate. It keeps an existing one that covers the names.
func (c *CA) Leaf(name, commonName string, organizations, sans []string) (crtFile, keyFile string, err error) {
	crtFile, keyFile = filepath.Join(c.Dir, name+".crt"), filepath.Join(c.Dir, name+".key")
	if covers(crtFile, sans) && exists(keyFile) {
		return crtFile, keyFile, nil
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	t := template(commonName, organizations)
	t.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	for _, s := range sans {
		if ip := net.ParseIP(s); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, s)
		}
	}
	return crtFile, keyFile, write(crtFile, keyFile, t, c.cert, k, c.key)
}

func covers(crtFile string, sans []string) bool {
	b, err := os.ReadFile(crtFile)
	if err != nil {
		return false
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil || time.Until(cert.NotAfter) < 30*24*time.Hour {
		return false
	}
	for _, s := range sans {
		if cert.VerifyHostname(s) != nil {
			return false
		}
	}
	return true
}

// ServiceAccountKeys makes dir/sa.key and dir/sa.pub.
func ServiceAccountKeys(dir string) (keyFile, pubFile string, err error) {
	keyFile, pubFile = filepath.Join(dir, "sa.key"), filepath.Join(dir, "sa.pub")
	if exists(keyFile) && exists(pubFile) {
		return keyFile, pubFile, nil
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

func template(commonName string, organizations []string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: commonName, Organization: organizations},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(validity)}
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
	tmp := path + ".new"
	if err := os.WriteFile(tmp, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
