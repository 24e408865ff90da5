"""Small programs around a run: conversion, quickstart, checks."""
